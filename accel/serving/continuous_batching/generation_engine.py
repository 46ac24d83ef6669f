"""Generate text for many callers at once, as texts or tokens, for threads or an event loop."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral
from types import TracebackType
from typing import Any, SupportsIndex, cast

from ...decoding.generation_options import GenerationOptions
from ...decoding.grammars import GrammarConstraint, GrammarTokenizer
from ...decoding.stop_text import TextPieces, byte_tokens
from ...errors import ArtifactNotFoundError, ConfigError, InputError
from ...models.processors import companion_of
from .scheduler import GenerationLimits, Scheduler
from .token_stream import Finish, Generation, Token

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The text that one generated token adds.

    Attributes:
        text: Final text. Empty if the token ends in the middle of a character or if the text may be the start of a stop string.
        tokens: Number of tokens generated so far.
        finish: Reason why the generation ended, `stop` or `length`; only set on the last piece.
        token: The generated token.
    """

    text: str
    tokens: int
    finish: Finish | None = None
    token: Token | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedText:
    """The complete text generated for one prompt.

    Attributes:
        text: The generated text, without the prompt and without the stop string.
        finish: Reason why the generation ended: `stop`, `length` or `cancelled`.
        prompt_tokens: Number of tokens of the prompt.
        new_tokens: Number of generated tokens.
        queued_s: Seconds that the prompt waited until the model began to read it.
        prefill_s: Seconds from the end of the wait to the first generated token.
    """

    text: str
    finish: Finish
    prompt_tokens: int
    new_tokens: int
    queued_s: float
    prefill_s: float


class GenerationEngine:
    """Continuous batching: generate text for many callers at once. Each caller gets the same text as if it were alone.

    Rows join and leave the batch between two decoding steps, if the states of the backend can be joined (`Scheduler.joins`). If not,
    waiting rows start together after the previous rows have finished. With greedy decoding, texts are equal to those of `model.generate`.
    With sampling and a seed, they are equal except for rounding errors.

    Args:
        model: `ORTModelForCausalLM` or `ORTModelForSeq2SeqLM`. Nothing else may run the model at the same time, unless its sessions are
            thread-safe.
        tokenizer: Tokenizer of the model; `None` means the tokenizer in the model's folder.
        limits: Limits of the queue and of the running batch.

    Raises:
        InputError: The model does not generate text from text.
        ConfigError: No tokenizer was passed and the model's folder has none.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, limits: GenerationLimits | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(model)
        self._encoding = threading.Lock()
        self._bytes = byte_tokens(self.tokenizer)
        self._grammars: GrammarTokenizer | None = None
        self.scheduler = Scheduler(model, limits or GenerationLimits())

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise ConfigError(
            "A GenerationEngine cannot be pickled or copied, because it contains running threads.",
            fix="pickle the model, and start accel.GenerationEngine(model) in the other process.",
        )

    # The methods below convert prompts to token ids.

    def encode(self, prompt: Prompt, template: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids of a prompt.

        A prompt is a text, a list of messages (`role` and `content`) for the tokenizer's chat template, or a list of token ids.
        The argument `template` contains variables of the chat template.

        Raises:
            InputError: The prompt is empty, has an unsupported type, or the chat template rejects the messages.
        """
        if isinstance(prompt, str):
            with self._encoding:
                tokens = list(self.tokenizer(prompt)["input_ids"])
            if not prompt and not tokens:
                raise InputError(
                    "The prompt is an empty text, and the tokenizer adds no token to it.",
                    fix="pass a text with at least one character.",
                )
            return tokens
        if hasattr(prompt, "tolist"):
            # The prompt is a tensor or an array of token ids.
            prompt = prompt.tolist()
        if isinstance(prompt, Sequence) and prompt and all(isinstance(item, Mapping) for item in prompt):
            return self._chat(cast(Messages, prompt), template or {})
        if not isinstance(prompt, Sequence) or not all(
            isinstance(item, Integral) and not isinstance(item, bool) for item in prompt
        ):
            raise InputError(
                f"The prompt has the unsupported type {type(prompt).__name__}"
                f"{f' of {type(prompt[0]).__name__}' if isinstance(prompt, Sequence) else ''}.",
                fix="pass one text, one list of token ids, or a list of messages with `role` and `content`.",
            )
        return [int(cast(int, token)) for token in prompt]

    def _chat(self, messages: Messages, template: Mapping[str, Any]) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                "The prompt is a list of messages, but the tokenizer has no chat template.",
                fix="pass the prompt as a text.",
            )
        try:
            with self._encoding:
                encoded = self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages], add_generation_prompt=True, return_dict=True, **template
                )
        # Chat templates raise errors of any type, for example about roles.
        except Exception as error:
            raise InputError(
                f"The chat template of the tokenizer rejects the messages: {error}",
                fix="correct the roles and the order of the messages.",
            ) from error
        return list(encoded["input_ids"])

    # The methods below generate text.

    def submit(
        self, prompt: Prompt, options: GenerationOptions | None = None, template: Mapping[str, Any] | None = None
    ) -> Generation:
        """Start generating text for a prompt. Iterate over the returned object to get tokens, in a thread or an event loop, or cancel it.

        The argument `template` contains variables of the chat template, such as `tools`, for a prompt that is a list of messages.

        Raises:
            InputError: The prompt or the options are invalid.
            QueueFullError: The queue is full.
            EngineClosedError: The engine was closed.
        """
        if options is not None and not isinstance(options, GenerationOptions):
            raise InputError(
                f"The argument options is a {type(options).__name__}, not GenerationOptions.",
                fix="pass accel.GenerationOptions(max_new_tokens=..., ...).",
            )
        options = options or GenerationOptions()
        ids = self.encode(prompt, template)
        return self.scheduler.submit(ids, options, self._constraint(options.grammar) if options.grammar else None)

    def _constraint(self, grammar: str) -> GrammarConstraint:
        with self._encoding:
            if self._grammars is None:
                ends = self.model.generation_config.eos_token_id
                ends = self.tokenizer.eos_token_id if ends is None else ends
                ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
                vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
                self._grammars = GrammarTokenizer(self.tokenizer, vocabulary, ends)
            return self._grammars.constraint(grammar)

    async def generate(self, prompt: Prompt, options: GenerationOptions | None = None) -> AsyncIterator[Token]:
        """Yield tokens as they are generated. If the caller stops iterating, its row is released. Raises the errors of `submit`."""
        async for token in self.submit(prompt, options):
            yield token

    async def stream(self, generation: Generation) -> AsyncIterator[TextPiece]:
        """Yield text as it is generated, for an event loop. A stop string ends the generation."""
        reader = _Detokenizer(self.tokenizer, self._bytes, generation)
        async for token in generation:
            piece = reader.take(token)
            yield piece
            if piece.finish is not None:
                return

    def pieces(self, generation: Generation) -> Iterator[TextPiece]:
        """Yield text as it is generated, for a thread. A stop string ends the generation."""
        reader = _Detokenizer(self.tokenizer, self._bytes, generation)
        for token in generation:
            piece = reader.take(token)
            yield piece
            if piece.finish is not None:
                return

    async def answer(self, prompt: Prompt, options: GenerationOptions | None = None) -> GeneratedText:
        """Generate the complete text for a prompt without blocking the event loop. Raises the errors of `submit`."""
        generation = self.submit(prompt, options)
        return _generated_text(generation, [piece async for piece in self.stream(generation)])

    def __call__(self, prompt: Prompt, options: GenerationOptions | None = None) -> GeneratedText:
        """Generate the complete text for a prompt and wait for it. Raises the errors of `submit`."""
        generation = self.submit(prompt, options)
        return _generated_text(generation, list(self.pieces(generation)))

    # The methods below close the engine.

    def close(self, *, drain: bool = True) -> None:
        """Accept no more prompts, then finish the accepted ones (with `drain=False`: cancel them). The model stays open."""
        self.scheduler.close(drain=drain)

    def __enter__(self) -> GenerationEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)


class _Detokenizer:
    """Convert the tokens of one generation to pieces of text."""

    def __init__(self, tokenizer: Any, single_bytes: Set[int], generation: Generation) -> None:
        options = generation.options
        self._text = TextPieces(tokenizer, options.stop, single_bytes, options.visible_tokens)
        self._generation = generation
        self._tokens = 0

    def take(self, token: Token) -> TextPiece:
        """Return the text that a token adds."""
        self._tokens += 1
        text = self._text.push(token.id)
        finish: Finish | None = token.finish
        if finish is not None:
            text += self._text.finish()
        if self._text.stopped:
            finish = "stop"
            self._generation.cancel()
        return TextPiece(text, self._tokens, finish, token)


def _generated_text(generation: Generation, pieces: Sequence[TextPiece]) -> GeneratedText:
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
            f"The model folder {model.artifact.path.name} has no tokenizer.",
            fix="pass a tokenizer: GenerationEngine(model, tokenizer=...).",
        ) from error
