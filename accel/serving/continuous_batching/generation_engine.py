"""Answers of a generating model for many callers at once, in threads or an event loop, as texts or tokens."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import TracebackType
from typing import Any, SupportsIndex, cast

from ...decoding.generation_options import GenerationOptions
from ...decoding.stop_text import TextPieces, byte_tokens
from ...errors import ArtifactNotFoundError, ConfigError, InputError
from ...models.processors import companion_of
from .scheduler import GenerationLimits, Scheduler
from .token_stream import Finish, Generation, Token

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The text that one token added to an answer.

    Attributes:
        text: Final text; empty for a part of a character and for what may become a stop text.
        tokens: Number of tokens of the answer so far.
        finish: On the last piece, why the answer ends: `stop` or `length`.
    """

    text: str
    tokens: int
    finish: Finish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedText:
    """A whole answer.

    Attributes:
        text: Without the prompt and the stop text.
        finish: Why the answer ends: `stop`, `length` or `cancelled`.
        prompt_tokens: Tokens read.
        new_tokens: Tokens generated.
        queued_s: Seconds until its prompt was read.
        prefill_s: Seconds from then to its first token.
    """

    text: str
    finish: Finish
    prompt_tokens: int
    new_tokens: int
    queued_s: float
    prefill_s: float


class GenerationEngine:
    """Continuous batching: prompts of many callers are continued together, each as it would be alone.

    Rows join and leave between two steps where the backend's states can be joined (`Scheduler.joins`); otherwise waiting rows start
    together when the rows before them have finished. Greedy answers equal those of `model.generate`; drawn answers with a seed equal them
    up to rounding.

    Args:
        model: `ORTModelForCausalLM` or `ORTModelForSeq2SeqLM`. Nothing else may run it at the same time, unless its sessions are
            thread-safe.
        tokenizer: Its tokenizer; the one in its folder when `None`.
        limits: How much at once.

    Raises:
        InputError: The model does not continue text.
        ConfigError: No tokenizer was given, and none is with the model.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, limits: GenerationLimits | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(model)
        self._encoding = threading.Lock()
        self._bytes = byte_tokens(self.tokenizer)
        self.scheduler = Scheduler(model, limits or GenerationLimits())

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise ConfigError(
            "A GenerationEngine runs threads, which cannot be pickled or copied.",
            fix="pickle the model, and start accel.GenerationEngine(model) in the other process.",
        )

    # Prompts

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a text, of messages (`role` and `content`, through the tokenizer's chat template), or tokens as they are.

        Raises:
            InputError: An empty prompt, messages that the template refuses, or none of these.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("The prompt is empty.", fix="give a text.")
            with self._encoding:
                return list(self.tokenizer(prompt)["input_ids"])
        if hasattr(prompt, "tolist"):
            # A tensor or an array of tokens.
            prompt = prompt.tolist()
        if isinstance(prompt, Sequence) and prompt and all(isinstance(one, Mapping) for one in prompt):
            return self._chat(cast(Messages, prompt))
        if not isinstance(prompt, Sequence) or not all(
            isinstance(one, Integral) and not isinstance(one, bool) for one in prompt
        ):
            raise InputError(
                f"The prompt is a {type(prompt).__name__}{f' of {type(prompt[0]).__name__}' if isinstance(prompt, Sequence) else ''}.",
                fix="give one text, one row of tokens (integers), or messages with role and content.",
            )
        return [int(cast(int, token)) for token in prompt]

    def _chat(self, messages: Messages) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError("The tokenizer has no chat template.", fix="give the prompt as a text.")
        try:
            with self._encoding:
                found = self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages], add_generation_prompt=True, return_dict=True
                )
        # Templates raise errors of their own (jinja2), about roles for example.
        except Exception as error:
            raise InputError(f"The chat template refuses the messages: {error}", fix="correct their roles.") from error
        return list(found["input_ids"])

    # Answers

    def submit(self, prompt: Prompt, options: GenerationOptions | None = None) -> Generation:
        """Start an answer: iterate over its tokens from a thread or in an event loop, or cancel it.

        Raises:
            InputError: An invalid prompt, or invalid options.
            QueueFullError: The queue is full.
            EngineClosedError: After `close`.
        """
        if options is not None and not isinstance(options, GenerationOptions):
            raise InputError(
                f"options is a {type(options).__name__}.", fix="pass GenerationOptions(max_new_tokens=..., ...)."
            )
        return self.scheduler.submit(self.encode(prompt), options or GenerationOptions())

    async def generate(self, prompt: Prompt, options: GenerationOptions | None = None) -> AsyncIterator[Token]:
        """Yield tokens as they come; a caller that stops iterating frees its row. Raises as `submit` does."""
        async for token in self.submit(prompt, options):
            yield token

    async def stream(self, generation: Generation) -> AsyncIterator[TextPiece]:
        """Yield the text of an answer as it comes; a stop text ends the answer."""
        reader = _Reader(self.tokenizer, generation)
        async for token in generation:
            piece = reader.take(token)
            yield piece
            if piece.finish is not None:
                return

    def pieces(self, generation: Generation) -> Iterator[TextPiece]:
        """Yield as `stream` does, in a thread."""
        reader = _Reader(self.tokenizer, generation)
        for token in generation:
            piece = reader.take(token)
            yield piece
            if piece.finish is not None:
                return

    async def answer(self, prompt: Prompt, options: GenerationOptions | None = None) -> GeneratedText:
        """Await a whole answer. Raises as `submit` does."""
        generation = self.submit(prompt, options)
        return _whole(generation, [piece async for piece in self.stream(generation)])

    def __call__(self, prompt: Prompt, options: GenerationOptions | None = None) -> GeneratedText:
        """Wait for a whole answer. Raises as `submit` does."""
        generation = self.submit(prompt, options)
        return _whole(generation, list(self.pieces(generation)))

    # Lifetime

    def close(self, *, drain: bool = True) -> None:
        """Accept no more prompts and finish the accepted ones, or cancel them without `drain`. The model stays open."""
        self.scheduler.close(drain=drain)

    def __enter__(self) -> GenerationEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)


class _Reader:
    """Pieces of text of the tokens of one answer."""

    def __init__(self, tokenizer: Any, generation: Generation) -> None:
        self._text = TextPieces(tokenizer, generation.options.stop)
        self._generation = generation
        self._tokens = 0

    def take(self, token: Token) -> TextPiece:
        """The piece that a token adds."""
        self._tokens += 1
        text = self._text.push(token.id)
        finish: Finish | None = token.finish
        if finish is not None:
            text += self._text.finish()
        if self._text.stopped:
            finish = "stop"
            self._generation.cancel()
        return TextPiece(text, self._tokens, finish)


def _whole(generation: Generation, pieces: Sequence[TextPiece]) -> GeneratedText:
    return GeneratedText(
        text="".join(piece.text for piece in pieces),
        finish=(pieces[-1].finish if pieces else None) or "cancelled",
        prompt_tokens=len(generation.ids),
        new_tokens=pieces[-1].tokens if pieces else 0,
        queued_s=generation.queued_s,
        prefill_s=generation.prefill_s,
    )


def _tokenizer_of(model: Any) -> Any:
    try:
        return companion_of(model, "AutoTokenizer")
    except ArtifactNotFoundError as error:
        raise ConfigError(
            f"{model.artifact.path.name} has no tokenizer.", fix="pass tokenizer=... to the engine."
        ) from error
