"""Generated text: OpenAI's completions and chat, and `/generate`, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...decoding.generation_options import GenerationOptions
from ...errors import RequestTimeoutError
from ..continuous_batching.generation_engine import GenerationEngine, Prompt, TextPiece
from ..continuous_batching.token_stream import Generation
from .bodies import Body
from .endpoints import Call, Endpoint
from .replies import Json, openai_error, plain_error, problem_of, write_json

_OPERATION = "generate"
_Count = Annotated[int, Field(ge=1, le=1 << 31)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


_None = Annotated[list[Any], Field(max_length=0)]


class Sampling(Body):
    """How to continue a prompt; what is left out is as the model's `generation_config` has it."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=1 << 31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    ignore_eos: bool = False

    def options(self, new_tokens: int | None, temperature: float | None) -> GenerationOptions:
        """As the engine takes them."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return GenerationOptions(
            max_new_tokens=new_tokens,
            temperature=self.temperature if self.temperature is not None else temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            stop=tuple(text for text in stop if text),
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )


class StreamOptions(Body):
    """What a stream tells in addition to text: the token counts in a last event, and (vLLM's field) in each event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


_IGNORED = {
    "user": "It tells OpenAI who asks.",
    "safety_identifier": "It tells OpenAI who asks.",
    "metadata": "It is kept with answers that are stored, and none are.",
    "prompt_cache_key": "Nothing is kept of a prompt.",
    "prompt_cache_retention": "Nothing is kept of a prompt.",
    "prompt_cache_options": "Nothing is kept of a prompt.",
}
_ONE = "leave it out, and send the request once for each answer, with another seed."
_NO_TOOLS = "leave it out, and describe the tools in the messages."
_NO_LOGPROBS = "leave it out: probabilities of tokens are not returned."


class OpenAIBody(Sampling):
    """What OpenAI's two endpoints have in common.

    Clients send many fields with the value that asks for nothing; that value is taken, and no other.
    """

    n: Literal[1] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    ignored: ClassVar[Mapping[str, str]] = _IGNORED
    remedies: ClassVar[Mapping[str, str]] = {
        "n": _ONE,
        "store": "leave it out: answers are not stored.",
        "service_tier": "leave it out: there is one tier.",
        "stream_options": "send include_usage and continuous_usage_stats alone.",
    }


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation."""

    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart]
    name: str | None = None
    # An answer's own message comes back in the next request, with all of its fields.
    refusal: None = None
    annotations: _None | None = None
    audio: None = None
    function_call: None = None
    tool_calls: _None | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class TextFormat(Body):
    """The only format of answers."""

    type: Literal["text"]


class ChatBody(OpenAIBody):
    """What `/v1/chat/completions` takes."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    response_format: TextFormat | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    tools: _None | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None

    ignored: ClassVar[Mapping[str, str]] = {**_IGNORED, "parallel_tool_calls": "No tools are called."}
    refused: ClassVar[Mapping[str, str]] = {
        "audio": "leave it out: answers are texts.",
        "function_call": _NO_TOOLS,
        "functions": _NO_TOOLS,
        "moderation": "leave it out, and check texts with a classifier at /classify.",
        "prediction": "leave it out: answers are generated token by token.",
        "reasoning_effort": "leave it out, and ask for it in the messages.",
        "verbosity": "leave it out, and ask for it in the messages, or set max_tokens.",
        "web_search_options": "leave it out, and put what was found into the messages.",
    }
    remedies: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.remedies,
        "tools": _NO_TOOLS,
        "tool_choice": _NO_TOOLS,
        "logprobs": _NO_LOGPROBS,
        "top_logprobs": _NO_LOGPROBS,
        "response_format": "ask for text, and describe another format in the messages.",
        "modalities": "ask for text alone.",
        "messages": "send messages of text.",
    }


class CompletionBody(OpenAIBody):
    """What `/v1/completions` takes: texts, or tokens."""

    prompt: str | list[int] | list[str] | list[list[int]] = Field(min_length=1)
    max_tokens: _Count = 16
    logprobs: None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    remedies: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.remedies,
        "logprobs": _NO_LOGPROBS,
        "echo": "leave it out, and put the prompt before the answer.",
        "best_of": _ONE,
        "suffix": "leave it out: models here continue texts, and do not fill gaps.",
    }

    def prompts(self) -> list[Prompt]:
        """One for each answer."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class GenerateBody(Sampling):
    """What `/generate` takes: a text, which a chat template does not change."""

    inputs: str = Field(min_length=1)
    max_new_tokens: _Count | None = None
    stream: bool = True


class _Answers:
    """The answers to the prompts of one request, while they are made.

    Args:
        call: Who asks.
        name: The model's name.
        engine: The model's.
        generations: One a prompt.
    """

    def __init__(self, call: Call, name: str, engine: GenerationEngine, generations: Sequence[Generation]) -> None:
        self.name, self.created = name, int(time.time())
        self._call, self._engine, self._generations = call, engine, generations
        self._tokens = [0] * len(generations)

    @property
    def usage(self) -> dict[str, int]:
        """Tokens read and made."""
        read, made = sum(len(one.ids) for one in self._generations), sum(self._tokens)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    async def pieces(self) -> AsyncGenerator[tuple[int, TextPiece]]:
        """Pieces of all answers as they come, each with the number of its prompt. Whoever stops listening frees the rows.

        Raises:
            RequestTimeoutError: None came for as long as the engine waits.
        """
        queue: asyncio.Queue[tuple[int, TextPiece | Exception]] = asyncio.Queue()

        async def follow(number: int, generation: Generation) -> None:
            try:
                async for piece in self._engine.stream(generation):
                    queue.put_nowait((number, piece))
            except Exception as error:  # noqa: BLE001  # raised by who reads the queue
                queue.put_nowait((number, error))

        tasks = [asyncio.create_task(follow(*item)) for item in enumerate(self._generations)]
        left = len(tasks)
        seconds = self._call.engine.limits.timeout_s
        try:
            while left:
                try:
                    async with asyncio.timeout(seconds):
                        number, piece = await queue.get()
                except TimeoutError as error:
                    raise RequestTimeoutError(
                        f"No token came within {seconds:g} s, and the request was dropped.", fix="try again later."
                    ) from error
                if isinstance(piece, Exception):
                    self._call.server.metrics.failed(self.name, piece)
                    raise piece
                self._tokens[number] = piece.tokens
                if piece.finish is not None:
                    left -= 1
                    if not left:
                        self._count()
                yield number, piece
        finally:
            for task in tasks:
                task.cancel()
            self.cancel()

    def cancel(self) -> None:
        """Free the rows of what is not finished."""
        for generation in self._generations:
            generation.cancel()

    def _count(self) -> None:
        """Before the client has the last piece: who scrapes after it finds it counted."""
        timing, first = self._call.timing, self._generations[0]
        timing.queue_s = max(one.queued_s for one in self._generations)
        timing.inference_s = time.perf_counter() - min(one.created for one in self._generations) - timing.queue_s
        timing.tokens = self.usage["prompt_tokens"]
        self._call.worked = True
        self._call.server.metrics.generated(self.name, self.usage, first.queued_s + first.prefill_s)

    async def whole(self) -> list[tuple[str, str]]:
        """Text and reason of its end of each answer. A caller that hangs up frees the rows.

        Raises:
            ClientDisconnect: It did.
        """
        texts = [""] * len(self._generations)
        ends = [""] * len(self._generations)

        async def collect() -> None:
            async with contextlib.aclosing(self.pieces()) as pieces:
                async for number, piece in pieces:
                    texts[number] += piece.text
                    ends[number] = piece.finish or ""

        work = asyncio.ensure_future(collect())
        gone = asyncio.ensure_future(self._call.hung_up())
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            work.result()
        finally:
            work.cancel()
            gone.cancel()
            self.cancel()
        return list(zip(texts, ends, strict=True))


async def _started(call: Call, body: Sampling, prompts: Sequence[Prompt], new: int | None, *, draw: bool) -> _Answers:
    """The answers, begun.

    Args:
        call: Who asks.
        body: How to continue.
        prompts: What.
        new: Tokens of an answer, at most.
        draw: Whether tokens are drawn where neither the request nor the model says otherwise, as OpenAI does.
    """
    call.check_batch(len(prompts))
    call.check_texts([one for one in prompts if isinstance(one, str) or not (one and isinstance(one[0], int))])
    name = call.server.model_for(body.model, _OPERATION)
    engine = await asyncio.to_thread(call.engine.generator, name)
    options = body.options(new, 1.0 if draw and not engine.model.generation_config.do_sample else None)
    generations: list[Generation] = []

    def submit() -> None:
        start = time.perf_counter()
        for prompt in prompts:
            # One by one: those before one that is refused are cancelled.
            generations.append(engine.submit(prompt, options))  # noqa: PERF401
        call.timing.tokenization_s = time.perf_counter() - start

    try:
        await asyncio.to_thread(submit)
    except BaseException as error:
        for one in generations:
            one.cancel()
        if isinstance(error, Exception):
            call.server.metrics.turned_away(name, error)
        raise
    return _Answers(call, name, engine, generations)


class _Stream(StreamingResponse):
    """Server-sent events. A caller may be gone before the first of them is asked for: the rows are freed here, whatever was run."""

    def __init__(self, answers: _Answers, lines: AsyncIterator[bytes]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


_Event = Callable[[int, TextPiece], list[dict[str, Any]]]


def _streamed(
    call: Call,
    answers: _Answers,
    event: _Event,
    *,
    before: Sequence[Any] = (),
    usage: Any = None,
    counted: bool = False,
) -> Response:
    """Server-sent events: what `event` makes of each piece, and OpenAI's last line.

    Args:
        call: Who asks.
        answers: The answers.
        event: The events of a piece of an answer.
        before: Events before the first piece.
        usage: The last event, of the token counts; none when `None`.
        counted: Whether each event has the token counts.
    """

    async def lines() -> AsyncIterator[bytes]:
        for item in before:
            yield _line(item)
        try:
            async with contextlib.aclosing(answers.pieces()) as pieces:
                async for number, piece in pieces:
                    for item in event(number, piece):
                        yield _line({**item, "usage": answers.usage} if counted else item)
        except Exception as error:  # noqa: BLE001  # the status is sent: the stream tells it
            yield _line(plain_error(problem_of(error, call.id), call.id))
            return
        if usage is not None:
            yield _line(usage(answers.usage))
        yield b"data: [DONE]\n\n"

    return _Stream(answers, lines())


def _line(item: Any) -> bytes:
    return b"data: " + write_json(item) + b"\n\n"


async def _chat(call: Call, body: ChatBody) -> Response:
    messages = [message.plain() for message in body.messages]
    new = body.max_completion_tokens or body.max_tokens
    answers = await _started(call, body, [messages], new, draw=True)
    head = {"id": f"chatcmpl-{call.id}", "created": answers.created, "model": answers.name}
    if not body.stream:
        ((text, end),) = await answers.whole()
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": end}
        return Json({**head, "object": "chat.completion", "choices": [choice], "usage": answers.usage})

    def chunk(delta: dict[str, Any], end: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}
        return {**head, "object": "chat.completion.chunk", "choices": [choice]}

    def event(_: int, piece: TextPiece) -> list[dict[str, Any]]:
        found = [chunk({"content": piece.text}, None)] if piece.text else []
        return [*found, chunk({}, piece.finish)] if piece.finish else found

    first = chunk({"role": "assistant", "content": ""}, None)
    return _streamed(call, answers, event, before=[first], **_counts(body, {**head, "object": "chat.completion.chunk"}))


def _counts(body: OpenAIBody, head: dict[str, Any]) -> dict[str, Any]:
    """Which events of a stream have token counts: arguments of `_streamed`."""
    asked = body.stream_options or StreamOptions()
    last = (lambda usage: {**head, "choices": [], "usage": usage}) if asked.include_usage else None
    return {"usage": last, "counted": asked.include_usage and asked.continuous_usage_stats}


async def _completions(call: Call, body: CompletionBody) -> Response:
    answers = await _started(call, body, body.prompts(), body.max_tokens, draw=True)
    head = {"id": f"cmpl-{call.id}", "object": "text_completion", "created": answers.created, "model": answers.name}

    def choice(number: int, text: str, end: str | None) -> dict[str, Any]:
        return {"index": number, "text": text, "logprobs": None, "finish_reason": end}

    if not body.stream:
        choices = [choice(number, *found) for number, found in enumerate(await answers.whole())]
        return Json({**head, "choices": choices, "usage": answers.usage})

    def event(number: int, piece: TextPiece) -> list[dict[str, Any]]:
        if not piece.text and not piece.finish:
            return []
        return [{**head, "choices": [choice(number, piece.text, piece.finish)]}]

    return _streamed(call, answers, event, **_counts(body, head))


async def _generate(call: Call, body: GenerateBody) -> Response:
    answers = await _started(call, body, [body.inputs], body.max_new_tokens, draw=False)
    if not body.stream:
        ((text, end),) = await answers.whole()
        return Json({"text": text, "finish_reason": end, "usage": answers.usage})

    def event(_: int, piece: TextPiece) -> list[dict[str, Any]]:
        if not piece.finish:
            return [{"text": piece.text}] if piece.text else []
        return [{"text": piece.text, "finish_reason": piece.finish, "usage": answers.usage}]

    return _streamed(call, answers, event)


GENERATE = Endpoint(
    path="/generate", answer=_generate, body=GenerateBody, summary="A text continued, as server-sent events",
    tag="tasks", operation=_OPERATION, example={"inputs": "Once upon a time", "max_new_tokens": 64},
)  # fmt: skip
ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions", answer=_chat, body=ChatBody, summary="The answer in a conversation", tag="openai",
        error=openai_error, operation=_OPERATION, example={"messages": [{"role": "user", "content": "Where is it?"}], "max_tokens": 64},
    ),
    Endpoint(
        path="/v1/completions", answer=_completions, body=CompletionBody, summary="Texts continued", tag="openai",
        error=openai_error, operation=_OPERATION, example={"prompt": "Once upon a time", "max_tokens": 64},
    ),
    GENERATE,
)  # fmt: skip
