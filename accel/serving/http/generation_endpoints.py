"""Endpoints that generate text: OpenAI's completions and chat, and `/generate`; complete or streamed as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...decoding.generation_options import GenerationOptions
from ...errors import RequestTimeoutError
from ..continuous_batching.generation_engine import GenerationEngine, Prompt, TextPiece
from ..continuous_batching.token_stream import Generation
from .bodies import Body
from .endpoints import Endpoint, HttpCall
from .replies import JsonReply, http_error, openai_error, plain_error, write_json

_OPERATION = "generate"
_Count = Annotated[int, Field(ge=1, le=1 << 31)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


_None = Annotated[list[Any], Field(max_length=0)]
_SAME = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed")
"""Request fields that have the same name as an option of the engine."""


class Sampling(Body):
    """Sampling options of a request. The defaults are in the model's `generation_config`."""

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
        """Return the options of the engine; the argument `temperature` is used if the request has none."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return GenerationOptions(
            max_new_tokens=new_tokens,
            temperature=self.temperature if self.temperature is not None else temperature,
            stop=tuple(text for text in stop if text),
            ignore_eos=self.ignore_eos,
            **{name: value for name in _SAME if (value := getattr(self, name)) is not None},
        )


class StreamOptions(Body):
    """Options of a streamed response: token counts in the last event, or in every event (an extension of vLLM)."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


_IGNORED = {
    "user": "The field identifies the end user for OpenAI.",
    "safety_identifier": "The field identifies the end user for OpenAI.",
    "metadata": "The field belongs to stored responses, and this server does not store responses.",
    "prompt_cache_key": "This server does not cache prompts.",
    "prompt_cache_retention": "This server does not cache prompts.",
    "prompt_cache_options": "This server does not cache prompts.",
}
_ONE = "send one request for each answer, each with a different seed."
_NO_TOOLS = "remove the field, and describe the tools in the messages."
_NO_LOGPROBS = "remove the field: this server does not return token probabilities."


class OpenAIBody(Sampling):
    """Fields that both OpenAI endpoints have in common.

    Clients send many fields with a value that has no effect. For unsupported fields, only this value is accepted.
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
        "store": "remove store: this server does not store responses.",
        "service_tier": "remove service_tier: this server has only one tier.",
        "stream_options": "use only the fields include_usage and continuous_usage_stats.",
    }


class TextPart(Body):
    """One text part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation."""

    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart]
    name: str | None = None
    # Clients send the assistant's message back as part of the conversation, with these fields set to null or empty.
    refusal: None = None
    annotations: _None | None = None
    audio: None = None
    function_call: None = None
    tool_calls: _None | None = None

    def plain(self) -> dict[str, str]:
        """Return role and text of the message, for a chat template."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class TextFormat(Body):
    """The response format; only text is supported."""

    type: Literal["text"]


class ChatBody(OpenAIBody):
    """Request body of `/v1/chat/completions`."""

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

    ignored: ClassVar[Mapping[str, str]] = {**_IGNORED, "parallel_tool_calls": "This server does not call tools."}
    refused: ClassVar[Mapping[str, str]] = {
        "audio": "remove audio: this server returns only text.",
        "function_call": _NO_TOOLS,
        "functions": _NO_TOOLS,
        "moderation": "remove moderation, and check texts with a classification model at /classify.",
        "prediction": "remove prediction: the model generates every token of the answer.",
        "reasoning_effort": "remove reasoning_effort, and describe in the messages how long the model should reason.",
        "verbosity": "remove verbosity, and describe the length of the answer in the messages, or set max_tokens.",
        "web_search_options": "remove web_search_options, and put search results into the messages.",
    }
    remedies: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.remedies,
        "tools": _NO_TOOLS,
        "tool_choice": _NO_TOOLS,
        "logprobs": _NO_LOGPROBS,
        "top_logprobs": _NO_LOGPROBS,
        "response_format": 'use {"type": "text"}, and describe any other format in the messages.',
        "modalities": 'use ["text"]: this server returns only text.',
        "messages": "send messages whose content is text.",
    }


class CompletionBody(OpenAIBody):
    """Request body of `/v1/completions`; prompts are texts or token ids."""

    prompt: str | Annotated[list[int] | list[str] | list[list[int]], Field(min_length=1)]
    max_tokens: _Count = 16
    logprobs: None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    remedies: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.remedies,
        "logprobs": _NO_LOGPROBS,
        "echo": "remove echo, and put the prompt before the answer in the client.",
        "best_of": _ONE,
        "suffix": "remove suffix: this server can only continue a text, not insert text before a suffix.",
    }

    def prompts(self) -> list[Prompt]:
        """Return the prompts of the request as a list."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class GenerateBody(Sampling):
    """Request body of `/generate`: one text, used without a chat template."""

    inputs: str
    max_new_tokens: _Count | None = None
    stream: bool = True


class _RequestGenerations:
    """The running generations for the prompts of one request.

    Args:
        call: The HTTP request.
        name: Name of the model.
        engine: Generation engine of the model.
        generations: The generation of each prompt.
    """

    def __init__(self, call: HttpCall, name: str, engine: GenerationEngine, generations: Sequence[Generation]) -> None:
        self.name, self.created = name, int(time.time())
        self._call, self._engine, self._generations = call, engine, generations
        self._tokens = [0] * len(generations)

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of prompt tokens and generated tokens, in OpenAI's format."""
        read, generated = sum(len(generation.ids) for generation in self._generations), sum(self._tokens)
        return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}

    async def pieces(self) -> AsyncGenerator[tuple[int, TextPiece]]:
        """Yield pieces of text as (index of the prompt, piece). If the caller stops iterating, the rows are released.

        Raises:
            RequestTimeoutError: There was no new piece within the engine's `timeout_s`.
        """
        queue: asyncio.Queue[tuple[int, TextPiece | Exception]] = asyncio.Queue()

        async def follow(number: int, generation: Generation) -> None:
            try:
                async for piece in self._engine.stream(generation):
                    queue.put_nowait((number, piece))
            except Exception as error:  # noqa: BLE001  # the reader of the queue raises it again
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
                        f"The model generated no token within {seconds:g} s, so the request was cancelled.",
                        fix="try again later.",
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
        """Release the rows of unfinished generations."""
        for generation in self._generations:
            generation.cancel()

    def _count(self) -> None:
        """Record metrics before the client receives the last piece, so that a later request for metrics includes them."""
        timing, first = self._call.timing, self._generations[0]
        timing.queue_s = max(generation.queued_s for generation in self._generations)
        timing.inference_s = (
            time.perf_counter() - min(generation.created for generation in self._generations) - timing.queue_s
        )
        timing.tokens = self.usage["prompt_tokens"]
        self._call.worked = True
        self._call.server.metrics.generated(self.name, self.usage, first.queued_s + first.prefill_s)

    async def complete_texts(self) -> list[tuple[str, str]]:
        """Return the text and the finish reason of each generation. If the client disconnects, the rows are released.

        Raises:
            ClientDisconnect: The client disconnected.
        """
        texts = [""] * len(self._generations)
        ends = [""] * len(self._generations)

        async def collect() -> None:
            async with contextlib.aclosing(self.pieces()) as pieces:
                async for number, piece in pieces:
                    texts[number] += piece.text
                    ends[number] = piece.finish or ""

        try:
            await self._call.finished(asyncio.ensure_future(collect()))
        finally:
            self.cancel()
        return list(zip(texts, ends, strict=True))


async def _started(
    call: HttpCall, body: Sampling, prompts: Sequence[Prompt], new: int | None, *, draw: bool
) -> _RequestGenerations:
    """Start a generation for each prompt.

    Args:
        call: The HTTP request.
        body: Sampling options of the request.
        prompts: The prompts.
        new: Greatest number of new tokens for each prompt.
        draw: Whether to sample tokens by default, as OpenAI does.
    """
    call.check_batch(len(prompts))
    call.check_texts(
        [
            generation
            for generation in prompts
            if isinstance(generation, str) or not (generation and isinstance(generation[0], int))
        ]
    )
    name = call.server.model_for(body.model, _OPERATION)
    engine = await asyncio.to_thread(call.engine.generator, name)
    options = body.options(new, 1.0 if draw and not engine.model.generation_config.do_sample else None)
    generations: list[Generation] = []

    def submit() -> None:
        start = time.perf_counter()
        for prompt in prompts:
            # Append one by one: if a prompt is refused, the generations started before it are cancelled.
            generations.append(engine.submit(prompt, options))  # noqa: PERF401
        call.timing.tokenization_s = time.perf_counter() - start

    try:
        await asyncio.to_thread(submit)
    except BaseException as error:
        for generation in generations:
            generation.cancel()
        if isinstance(error, Exception):
            call.server.metrics.turned_away(name, error)
        raise
    return _RequestGenerations(call, name, engine, generations)


class _Stream(StreamingResponse):
    """Response with server-sent events. It releases the rows even if the client disconnects before the first event."""

    def __init__(self, answers: _RequestGenerations, lines: AsyncIterator[bytes]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then release the rows of the running batch that the request uses."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


_Event = Callable[[int, TextPiece], list[dict[str, Any]]]


def _streamed(
    call: HttpCall,
    answers: _RequestGenerations,
    event: _Event,
    *,
    before: Sequence[Any] = (),
    stream_options: StreamOptions | None = None,
    head: Mapping[str, Any] | None = None,
) -> Response:
    """Return the generations as server-sent events, with OpenAI's final line.

    Args:
        call: The HTTP request.
        answers: The running generations.
        event: Returns the events for a piece of text.
        before: Events to send before the first piece.
        stream_options: Which events have the token counts.
        head: Fields of the last event, which has the token counts.
    """
    usage = stream_options is not None and stream_options.include_usage
    counted = usage and stream_options is not None and stream_options.continuous_usage_stats

    async def lines() -> AsyncIterator[bytes]:
        for item in before:
            yield _line(item)
        try:
            async with contextlib.aclosing(answers.pieces()) as pieces:
                async for number, piece in pieces:
                    for item in event(number, piece):
                        yield _line({**item, "usage": answers.usage} if counted else item)
        except Exception as error:  # noqa: BLE001  # the HTTP status has been sent, so the error is sent as an event
            yield _line(plain_error(http_error(error, call.id), call.id))
            return
        if usage:
            yield _line({**(head or {}), "choices": [], "usage": answers.usage})
        yield b"data: [DONE]\n\n"

    return _Stream(answers, lines())


def _line(item: Any) -> bytes:
    return b"data: " + write_json(item) + b"\n\n"


async def _chat(call: HttpCall, body: ChatBody) -> Response:
    messages = [message.plain() for message in body.messages]
    new = body.max_completion_tokens or body.max_tokens
    answers = await _started(call, body, [messages], new, draw=True)
    head = {"id": f"chatcmpl-{call.id}", "created": answers.created, "model": answers.name}
    head["object"] = "chat.completion.chunk" if body.stream else "chat.completion"
    if not body.stream:
        ((text, end),) = await answers.complete_texts()
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": end}
        return JsonReply({**head, "choices": [choice], "usage": answers.usage})

    def chunk(delta: dict[str, Any], end: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}
        return {**head, "choices": [choice]}

    def event(_: int, piece: TextPiece) -> list[dict[str, Any]]:
        texts = [chunk({"content": piece.text}, None)] if piece.text else []
        return [*texts, chunk({}, piece.finish)] if piece.finish else texts

    first = chunk({"role": "assistant", "content": ""}, None)
    return _streamed(call, answers, event, before=[first], stream_options=body.stream_options, head=head)


async def _completions(call: HttpCall, body: CompletionBody) -> Response:
    answers = await _started(call, body, body.prompts(), body.max_tokens, draw=True)
    head = {"id": f"cmpl-{call.id}", "object": "text_completion", "created": answers.created, "model": answers.name}

    def choice(number: int, text: str, end: str | None) -> dict[str, Any]:
        return {"index": number, "text": text, "logprobs": None, "finish_reason": end}

    if not body.stream:
        choices = [choice(number, *answer) for number, answer in enumerate(await answers.complete_texts())]
        return JsonReply({**head, "choices": choices, "usage": answers.usage})

    def event(number: int, piece: TextPiece) -> list[dict[str, Any]]:
        if not piece.text and not piece.finish:
            return []
        return [{**head, "choices": [choice(number, piece.text, piece.finish)]}]

    return _streamed(call, answers, event, stream_options=body.stream_options, head=head)


async def _generate(call: HttpCall, body: GenerateBody) -> Response:
    answers = await _started(call, body, [body.inputs], body.max_new_tokens, draw=False)
    if not body.stream:
        ((text, end),) = await answers.complete_texts()
        return JsonReply({"text": text, "finish_reason": end, "usage": answers.usage})

    def event(_: int, piece: TextPiece) -> list[dict[str, Any]]:
        if not piece.finish:
            return [{"text": piece.text}] if piece.text else []
        return [{"text": piece.text, "finish_reason": piece.finish, "usage": answers.usage}]

    return _streamed(call, answers, event)


GENERATE = Endpoint(
    path="/generate", answer=_generate, body=GenerateBody, summary="Continue a text, streamed as server-sent events",
    tag="tasks", operation=_OPERATION, example={"inputs": "Once upon a time", "max_new_tokens": 64},
)  # fmt: skip
ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions", answer=_chat, body=ChatBody, summary="Generate the next message of a conversation", tag="openai",
        error=openai_error, operation=_OPERATION, example={"messages": [{"role": "user", "content": "Where is it?"}], "max_tokens": 64},
    ),
    Endpoint(
        path="/v1/completions", answer=_completions, body=CompletionBody, summary="Continue texts", tag="openai",
        error=openai_error, operation=_OPERATION, example={"prompt": "Once upon a time", "max_tokens": 64},
    ),
    GENERATE,
)  # fmt: skip
