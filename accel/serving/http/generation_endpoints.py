"""Endpoints that continue texts: OpenAI's completions and `/generate`; complete or streamed as server-sent events.

`openai_chat` uses the request fields and the functions of this module for conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...decoding.generation_options import GenerationOptions
from ...decoding.token_probabilities import token_bytes
from ...errors import RequestTimeoutError
from ..continuous_batching.generation_engine import GenerationEngine, Prompt, TextPiece
from ..continuous_batching.token_stream import Generation, Token
from .bodies import Body
from .endpoints import Endpoint, HttpCall
from .replies import JsonReply, http_error, openai_error, plain_error, write_json

OPERATION = "generate"
Count = Annotated[int, Field(ge=1, le=1 << 31)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


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


IGNORED = {
    "user": "The field identifies the end user for OpenAI.",
    "safety_identifier": "The field identifies the end user for OpenAI.",
    "metadata": "The field belongs to stored responses, and this server does not store responses.",
    "prompt_cache_key": "This server decides alone which prompts it caches.",
    "prompt_cache_retention": "This server decides alone which prompts it caches.",
    "prompt_cache_options": "This server decides alone which prompts it caches.",
}


class OpenAIBody(Sampling):
    """Fields that both OpenAI endpoints have in common.

    Clients send many fields with a value that has no effect. For unsupported fields, only this value is accepted.
    """

    n: Annotated[int, Field(ge=1, le=128)] | None = None
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

    ignored: ClassVar[Mapping[str, str]] = IGNORED
    refused: ClassVar[Mapping[str, str]] = {
        "prompt_logprobs": "remove prompt_logprobs: this server returns log-probabilities only for generated tokens."
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "n": "send a number from 1 to 128.",
        "store": "remove store: this server does not store responses.",
        "service_tier": "remove service_tier: this server has only one tier.",
        "stream_options": "use only the fields include_usage and continuous_usage_stats.",
    }


class CompletionBody(OpenAIBody):
    """Request body of `/v1/completions`; prompts are texts or token ids."""

    prompt: str | Annotated[list[int] | list[str] | list[list[int]], Field(min_length=1)]
    max_tokens: Count = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    remedies: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.remedies,
        "logprobs": "send a number from 0 to 20.",
        "echo": "remove echo, and put the prompt before the answer in the client.",
        "best_of": "remove best_of, and choose among the `n` answers in the client.",
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
    max_new_tokens: Count | None = None
    stream: bool = True


@dataclass(slots=True)
class CompleteText:
    """The text of one generation.

    Attributes:
        text: The text.
        end: Reason why the generation ended.
        tokens: The tokens of the text.
    """

    text: str = ""
    end: str = ""
    tokens: list[Token] = field(default_factory=list)

    def add(self, piece: TextPiece) -> None:
        """Add the next piece."""
        self.text += piece.text
        self.end = piece.finish or ""
        if piece.token is not None:
            self.tokens.append(piece.token)


class RequestGenerations:
    """The running generations for the prompts of one request.

    Args:
        call: The HTTP request.
        name: Name of the model.
        engine: Generation engine of the model.
        generations: The generations of the first prompt, then those of the next prompt.
        times: Number of generations of each prompt.

    Attributes:
        name: Name of the model.
        created: Time of the request in seconds since 1970.
        engine: Generation engine of the model.
    """

    def __init__(
        self, call: HttpCall, name: str, engine: GenerationEngine, generations: Sequence[Generation], times: int
    ) -> None:
        self.name, self.created, self.engine = name, int(time.time()), engine
        self._call, self._generations, self._times = call, generations, times
        self._tokens = [0] * len(generations)

    @property
    def usage(self) -> dict[str, Any]:
        """Numbers of prompt tokens, reused prompt tokens and generated tokens, in OpenAI's format."""
        read, generated = sum(len(each.ids) for each in self._generations[:: self._times]), sum(self._tokens)
        reused = sum(each.reused_tokens for each in self._generations[:: self._times])
        details = {"prompt_tokens_details": {"cached_tokens": reused}} if reused else {}
        return {**details, "prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}

    async def pieces(self) -> AsyncGenerator[tuple[int, TextPiece]]:
        """Yield pieces of text as (index of the prompt, piece). If the caller stops iterating, the rows are released.

        Raises:
            RequestTimeoutError: There was no new piece within the engine's `timeout_s`.
        """
        queue: asyncio.Queue[tuple[int, TextPiece | Exception]] = asyncio.Queue()

        async def follow(number: int, generation: Generation) -> None:
            try:
                async for piece in self.engine.stream(generation):
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

    async def complete_texts(self) -> list[CompleteText]:
        """Return the complete text of each generation. If the client disconnects, the rows are released.

        Raises:
            ClientDisconnect: The client disconnected.
        """
        texts = [CompleteText() for _ in self._generations]

        async def collect() -> None:
            async with contextlib.aclosing(self.pieces()) as pieces:
                async for number, piece in pieces:
                    texts[number].add(piece)

        try:
            await self._call.finished(asyncio.ensure_future(collect()))
        finally:
            self.cancel()
        return texts


async def started(
    call: HttpCall,
    body: Sampling,
    prompts: Sequence[Prompt],
    new: int | None,
    *,
    draw: bool,
    times: int = 1,
    settings: Mapping[str, Any] | None = None,
    template: Mapping[str, Any] | None = None,
) -> RequestGenerations:
    """Start generations for each prompt.

    Args:
        call: The HTTP request.
        body: Sampling options of the request.
        prompts: The prompts.
        new: Greatest number of new tokens for each prompt.
        draw: Whether to sample tokens by default, as OpenAI does.
        times: Number of generations for each prompt. The seed of the request counts up by one for each generation.
        settings: Further fields of `GenerationOptions`.
        template: Variables of the chat template, such as the tools.
    """
    call.check_batch(len(prompts) * times)
    call.check_texts(
        [
            generation
            for generation in prompts
            if isinstance(generation, str) or not (generation and isinstance(generation[0], int))
        ]
    )
    name = call.server.model_for(body.model, OPERATION)
    engine = await asyncio.to_thread(call.engine.generator, name)
    options = body.options(new, 1.0 if draw and not engine.model.generation_config.do_sample else None)
    options = replace(options, **(settings or {}))
    generations: list[Generation] = []

    def submit() -> None:
        start = time.perf_counter()
        for prompt in prompts:
            for i in range(times):
                seed = None if options.seed is None else options.seed + i
                # Append one by one: if a prompt is refused, the generations started before it are cancelled.
                generations.append(engine.submit(prompt, replace(options, seed=seed), template))
        call.timing.tokenization_s = time.perf_counter() - start

    try:
        await asyncio.to_thread(submit)
    except BaseException as error:
        for generation in generations:
            generation.cancel()
        if isinstance(error, Exception):
            call.server.metrics.turned_away(name, error)
        raise
    return RequestGenerations(call, name, engine, generations, times)


class EventStream(StreamingResponse):
    """Response with server-sent events. It releases the rows even if the client disconnects before the first event."""

    def __init__(self, answers: RequestGenerations, lines: AsyncIterator[bytes]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then release the rows of the running batch that the request uses."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


_Event = Callable[[int, TextPiece], list[dict[str, Any]]]


def streamed(
    call: HttpCall,
    answers: RequestGenerations,
    event: _Event,
    *,
    before: Sequence[Mapping[str, Any]] = (),
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
            yield _line({**item, "usage": None} if usage else item)
        try:
            async with contextlib.aclosing(answers.pieces()) as pieces:
                async for number, piece in pieces:
                    for item in event(number, piece):
                        if usage:
                            # OpenAI sends the field in every event if the client asks for it.
                            item = {**item, "usage": answers.usage if counted else None}
                        yield _line(item)
        except Exception as error:  # noqa: BLE001  # the HTTP status has been sent, so the error is sent as an event
            yield _line(plain_error(http_error(error, call.id), call.id))
            return
        if usage:
            yield _line({**(head or {}), "choices": [], "usage": answers.usage})
        yield b"data: [DONE]\n\n"

    return EventStream(answers, lines())


def _line(item: Any) -> bytes:
    return b"data: " + write_json(item) + b"\n\n"


async def _completions(call: HttpCall, body: CompletionBody) -> Response:
    answers = await started(
        call, body, body.prompts(), body.max_tokens, draw=True, times=body.n or 1,
        settings={"top_logprobs": body.logprobs},
    )  # fmt: skip
    head = {"id": f"cmpl-{call.id}", "object": "text_completion", "created": answers.created, "model": answers.name}
    tokenizer = answers.engine.tokenizer
    lengths: dict[int, int] = {}

    def choice(number: int, text: str, end: str | None, tokens: Sequence[Token]) -> dict[str, Any]:
        listed = None
        if body.logprobs is not None:
            start = lengths.get(number, 0)
            listed = _completion_logprobs(tokenizer, tokens, start)
            lengths[number] = start + sum(map(len, listed["tokens"]))
        return {"index": number, "text": text, "logprobs": listed, "finish_reason": end}

    if not body.stream:
        texts = await answers.complete_texts()
        choices = [choice(number, each.text, each.end, each.tokens) for number, each in enumerate(texts)]
        return JsonReply({**head, "choices": choices, "usage": answers.usage})

    def event(number: int, piece: TextPiece) -> list[dict[str, Any]]:
        tokens = [piece.token] if piece.token is not None and body.logprobs is not None else []
        if not piece.text and not piece.finish and not tokens:
            return []
        return [{**head, "choices": [choice(number, piece.text, piece.finish, tokens)]}]

    return streamed(call, answers, event, stream_options=body.stream_options, head=head)


def token_text(tokenizer: Any, token: int) -> tuple[str, list[int]]:
    """Return the text and the bytes of a token; incomplete characters of the text are replaced."""
    content = token_bytes(tokenizer, token)
    return content.decode("utf-8", "replace"), list(content)


def _completion_logprobs(tokenizer: Any, tokens: Sequence[Token], start: int) -> dict[str, list[Any]]:
    """Return log-probabilities in the format of OpenAI's completions. The first token starts at character `start`."""
    listed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        if token.probability is not None:
            text, _ = token_text(tokenizer, token.id)
            top = {token_text(tokenizer, each)[0]: value for each, value in token.probability.top}
            values = (text, token.probability.value, top, start)
            for name, value in zip(listed, values, strict=True):
                listed[name].append(value)
            start += len(text)
    return listed


async def _generate(call: HttpCall, body: GenerateBody) -> Response:
    answers = await started(call, body, [body.inputs], body.max_new_tokens, draw=False)
    if not body.stream:
        (answer,) = await answers.complete_texts()
        return JsonReply({"text": answer.text, "finish_reason": answer.end, "usage": answers.usage})

    def event(_: int, piece: TextPiece) -> list[dict[str, Any]]:
        if not piece.finish:
            return [{"text": piece.text}] if piece.text else []
        return [{"text": piece.text, "finish_reason": piece.finish, "usage": answers.usage}]

    return streamed(call, answers, event)


GENERATE = Endpoint(
    path="/generate", answer=_generate, body=GenerateBody, summary="Continue a text, streamed as server-sent events",
    tag="tasks", operation=OPERATION, example={"inputs": "Once upon a time", "max_new_tokens": 64},
)  # fmt: skip
ENDPOINTS = (
    Endpoint(
        path="/v1/completions", answer=_completions, body=CompletionBody, summary="Continue texts", tag="openai",
        error=openai_error, operation=OPERATION, example={"prompt": "Once upon a time", "max_tokens": 64},
    ),
    GENERATE,
)  # fmt: skip
