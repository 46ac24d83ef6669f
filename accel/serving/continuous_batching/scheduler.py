"""The thread that runs one generating model: it reads new prompts between the decoding steps of the running batch."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...config import check_number
from ...decoding.generation_options import GenerationOptions
from ...decoding.grammars import GrammarConstraint
from ...decoding.host_threads import has_own_threads, use_one_thread
from ...decoding.next_token import RowTokenSelector, choose_tokens
from ...errors import AccelError, EngineClosedError, InputError, QueueFullError, SessionError
from .prefix_cache import PrefixCache
from .running_rows import AnswerRow, PromptPrefill, RunningRows
from .token_stream import Generation

logger = logging.getLogger(__name__)

_LEAST_CACHE = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """Limits of the queue and of the running batch of one model.

    Attributes:
        rows: Greatest number of rows in the running batch.
        cache_tokens: Greatest number of tokens in the KV cache, including padding: number of rows times length of the longest row. `None`
            means the number of the model's positions, but at least 16,384.
        queue: Greatest number of prompts that wait.
        prefill_tokens: Number of prompt tokens that are read between two decoding steps. A greater number reads prompts faster, but the
            running rows wait longer.
        new_tokens: Greatest number of new tokens if neither the request nor the model limits them.
        max_new_tokens: Greatest number of new tokens that a request may ask for, because a long generation makes other requests wait.
            `None` means as many as fit into the KV cache.
        prefix_bytes: Greatest size of the keys and values of earlier prompts, which later prompts with the same beginning reuse. 0 turns
            the reuse off.
    """

    rows: int = 16
    cache_tokens: int | None = None
    queue: int = 256
    prefill_tokens: int = 512
    new_tokens: int = 256
    max_new_tokens: int | None = None
    prefix_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name in ("rows", "cache_tokens", "queue", "prefill_tokens", "new_tokens", "max_new_tokens"):
            check_number(name, getattr(self, name), 1)
        check_number("prefix_bytes", self.prefix_bytes, 0)


def continues_text(model: Any) -> bool:
    """Return whether a model generates text from token ids."""
    return getattr(model, "main_input_name", None) == "input_ids" and model.can_generate()


class Scheduler:
    """Continuous batching of one model, in its own thread.

    Between two decoding steps, finished and cancelled rows leave the batch. Then waiting prompts are read, up to
    `GenerationLimits.prefill_tokens` tokens, and their rows join the batch. For encoder-decoder models, and if the states of the backend
    cannot be joined, waiting rows start together after all previous rows have finished.

    Args:
        model: A causal language model, or an encoder-decoder model for text.
        limits: Limits of the queue and of the running batch.

    Raises:
        InputError: The model does not generate text from token ids.
    """

    def __init__(self, model: Any, limits: GenerationLimits) -> None:
        if not continues_text(model):
            raise InputError(
                f"{type(model).__name__} does not generate text from token ids.",
                fix="use a model for text-generation, such as ORTModelForCausalLM.",
            )
        self.model, self.limits = model, limits
        component = model.decoder_step.component
        self._behind_encoder = bool(model.config.is_encoder_decoder)
        self._limit = component.most_tokens
        self._parts = component.continues == "any"
        self.joins = not self._behind_encoder and model.new_cache().is_joinable
        """True if rows can join the running batch. If false, waiting rows start together after the running batch has finished."""
        # Removing tokens from a copy needs a croppable state, and continuing it a graph that reads several tokens after earlier tokens.
        reuses = self.joins and self._parts and component.croppable and limits.prefix_bytes
        self._prefixes = PrefixCache(limits.prefix_bytes) if reuses else None
        self.cache_tokens = limits.cache_tokens or max(_LEAST_CACHE, self._limit)
        self.steps = 0
        """Number of decoding steps so far."""
        self._vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        # A graph with rotary position embeddings also accepts positions beyond the trained positions, but its outputs
        # at these positions are useless.
        self._positions = int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", 0) or 0)
        self._batch = RunningRows(model, self._limit)
        self._waiting: deque[AnswerRow] = deque()
        self._reading: deque[PromptPrefill] = deque()
        self._changed = threading.Condition()
        self._closing = self._dropping = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="accel-generation", daemon=True)
        self._thread.start()

    # The methods below may be called from any thread.

    @property
    def waiting(self) -> int:
        """Number of prompts in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of rows in the running batch, including rows whose prompts are being read."""
        return len(self._batch.rows) + len(self._reading)

    def submit(
        self, ids: Sequence[int], options: GenerationOptions, constraint: GrammarConstraint | None = None
    ) -> Generation:
        """Put a prompt into the queue. The argument `constraint` is the grammar of the generated text.

        Raises:
            InputError: The prompt is empty or too long or has unknown token ids, or transformers rejects the options.
            QueueFullError: The queue is full.
            EngineClosedError: The scheduler was closed.
        """
        if os.getpid() != self._process:
            raise EngineClosedError(
                "The engine was started in another process, and its thread does not exist in this process.",
                fix="start a new engine in this process.",
            )
        row = self._row_of(Generation(ids, options, self._new_tokens(ids, options), self._wake), constraint)
        with self._changed:
            if self._closing:
                raise EngineClosedError(
                    "The generation engine is closed and accepts no more prompts.", fix="start a new engine."
                )
            if len(self._waiting) >= self.limits.queue:
                raise QueueFullError(
                    f"The queue is full: {len(self._waiting)} prompts are waiting, and the model generates at most {self.limits.rows} "
                    "texts at the same time.",
                    fix="try again later.",
                )
            self._waiting.append(row)
            self._changed.notify()
        return row.generation

    def close(self, *, drain: bool = True) -> None:
        """Accept no more prompts, finish the accepted ones (with `drain=False`: cancel them), and wait until the thread ends."""
        with self._changed:
            self._closing = True
            self._dropping = self._dropping or not drain
            self._changed.notify()
        self._thread.join()
        if self._prefixes is not None:
            self._prefixes.clear()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _new_tokens(self, ids: Sequence[int], options: GenerationOptions) -> int:
        """Return the greatest number of new tokens for a prompt, from the request, the model and the limits."""
        if not ids:
            raise InputError("The prompt has no tokens.", fix="pass at least one token id.")
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise InputError(
                f"The prompt contains token id {max(ids) if max(ids) >= self._vocabulary else min(ids)}, but the model has only the "
                f"token ids 0 to {self._vocabulary - 1}.",
                fix="use the tokenizer that belongs to the model.",
            )
        before = 1 if self._behind_encoder else len(ids)
        limits = [n for n in (self._limit, self._positions, self.cache_tokens) if n]
        room = min(limits) - before + (1 if not self._behind_encoder else 0)
        requested, most = options.max_new_tokens, self.limits.max_new_tokens
        if requested is not None and most is not None and requested > most:
            raise InputError(
                f"The request asks for {requested} new tokens, but at most {most} are allowed.",
                fix="ask for fewer new tokens, or raise the limit (max_new_tokens=..., --max-new-tokens).",
            )
        if self._behind_encoder and requested is not None and requested > room:
            raise InputError(
                f"The request asks for {requested} new tokens, but the decoder can generate at most {room} tokens for a prompt.",
                fix="ask for fewer new tokens.",
            )
        if room < 1 or (requested is not None and requested > room):
            raise InputError(
                f"The prompt has {len(ids)} tokens{f' and the request asks for {requested} new tokens' if requested else ''}, but prompt "
                f"and new tokens together can have at most {min(limits) + 1} tokens.",
                fix="shorten the prompt, or ask for fewer new tokens.",
            )
        if requested is not None:
            return requested
        usual = self.model.generation_config.max_new_tokens or self.limits.new_tokens
        return min(room, usual, most or usual)

    def _row_of(self, generation: Generation, constraint: GrammarConstraint | None) -> AnswerRow:
        options = generation.options
        if not self._behind_encoder:
            choice = RowTokenSelector(self.model, generation.ids, options, constraint=constraint)
            return AnswerRow(generation, choice)
        config = self.model.generation_config
        start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
        choice = RowTokenSelector(self.model, [int(start)], options, generation.ids, constraint)
        return AnswerRow(generation, choice, last=int(start))

    # The methods below run in the scheduler's thread.

    def _run(self) -> None:
        if has_own_threads(self.model):
            use_one_thread()
        with torch.inference_mode():
            while self._wait():
                try:
                    self._leave_cancelled()
                    if self.joins:
                        self._read()
                    elif not self._batch.rows:
                        self._start_together()
                    if self._batch.rows:
                        self.steps += 1
                        self._batch.step()
                except Exception as error:  # noqa: BLE001
                    # The callers of the running rows get the error. The thread continues, because the next rows may succeed.
                    self._fail(error)

    def _wait(self) -> bool:
        """Wait until there are prompts or rows to process. Return `False` if the engine closes before that."""
        with self._changed:
            while not (self._waiting or self._reading or self._batch.rows):
                if self._closing:
                    return False
                self._changed.wait()
            if self._dropping:
                for row in (*self._waiting, *self._batch.rows, *(reading.row for reading in self._reading)):
                    row.generation.cancelled = True
        return True

    def _leave_cancelled(self) -> None:
        leaving = [row for row in self._batch.rows if row.generation.cancelled]
        if leaving:
            self._batch.leave(leaving)
        leaving += [reading.row for reading in self._reading if reading.row.generation.cancelled]
        with self._changed:
            leaving += [row for row in self._waiting if row.generation.cancelled]
            # Rows that are cancelled after this line are removed by the next call of this method.
            gone = {id(row) for row in leaving}
            self._waiting = deque(row for row in self._waiting if id(row) not in gone)
        self._reading = deque(reading for reading in self._reading if id(reading.row) not in gone)
        for row in leaving:
            row.generation.end()

    def _read(self) -> None:
        """Read waiting prompts, and add the rows whose prompts are completely read to the running batch."""
        self._admit()
        budget = self.limits.prefill_tokens
        while self._reading and budget > 0:
            reading = self._reading[0]
            reading.begin(self._prefixes)
            before = reading.left
            if budget < before <= self.limits.prefill_tokens and budget < self.limits.prefill_tokens:
                # Read this prompt after the next step, in a single call. In calls with a part of the prompt each, the logits
                # would be rounded differently.
                break
            try:
                logits = reading.advance(budget)
            except Exception as error:  # noqa: BLE001
                # Only this prompt fails, because its KV cache is separate from the cache of the running rows.
                self._reading.popleft().row.generation.end(_caller_error(error))
                continue
            budget -= before - reading.left
            if logits is None:
                continue
            reading.store(self._prefixes)
            row = self._reading.popleft().row
            (token,) = choose_tokens([row.choice], logits)
            if row.take(token, logits[0]):
                continue
            try:
                self._batch.join(row, reading.cache)
            except Exception as error:
                row.generation.end(_caller_error(error))
                raise

    def _admit(self) -> None:
        """Start reading the oldest waiting prompts, as long as the KV cache has room for their greatest possible length."""
        rows = [*self._batch.rows, *(reading.row for reading in self._reading)]
        while self._waiting and len(rows) < self.limits.rows:
            longest = max(len(row.generation.ids) + row.generation.new_tokens for row in (self._waiting[0], *rows))
            if rows and (len(rows) + 1) * longest > self.cache_tokens:
                return
            rows.append(self._begun())
            self._reading.append(PromptPrefill(self.model, rows[-1], parts=self._parts))

    def _start_together(self) -> None:
        """Start as many waiting rows as fit into one batch, padded to the longest prompt and the greatest number of new tokens."""
        rows: list[AnswerRow] = []
        prompt = new = 0
        while self._waiting and len(rows) < self.limits.rows:
            generation = self._waiting[0].generation
            wider = max(prompt, 1 if self._behind_encoder else len(generation.ids))
            longer = max(new, generation.new_tokens)
            if rows and (
                (len(rows) + 1) * (wider + longer) > self.cache_tokens
                or (self._limit and wider + longer > self._limit + 1)
            ):
                break
            prompt, new = wider, longer
            rows.append(self._begun())
        if rows:
            self._batch.begin(rows)

    def _begun(self) -> AnswerRow:
        """Remove the oldest row from the queue, record that its prompt is being read, and return it."""
        with self._changed:
            row = self._waiting.popleft()
        row.generation.begin()
        return row

    def _fail(self, error: Exception) -> None:
        for row in self._batch.clear():
            row.generation.end(_caller_error(error))


def _caller_error(error: Exception) -> AccelError:
    """Return the error that callers get; the details of unexpected errors are only logged."""
    if isinstance(error, AccelError):
        return error
    logger.error("The generation of text failed.", exc_info=error)
    return SessionError(
        f"The generation of text failed with {type(error).__name__}.",
        fix="read the traceback in the log of the process.",
    )
