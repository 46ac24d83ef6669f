"""The generated tokens of one prompt: the scheduler's thread adds tokens, and the caller iterates over them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ...decoding.generation_options import GenerationOptions
from ...decoding.token_probabilities import TokenProbability

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        id: Token id in the vocabulary.
        finish: Reason why the generation ended; only set on the last token. `stop`: the model or a stop string ended it. `length`: the
            greatest number of new tokens is reached.
        probability: Log-probabilities, if `GenerationOptions.top_logprobs` is set.
    """

    id: int
    finish: Finish | None = None
    probability: TokenProbability | None = None


class Generation:
    """The generation for one prompt. Iterate over its tokens once, with `for` in a thread or `async for` in an event loop.

    Args:
        ids: Token ids of the prompt.
        options: Options of the generation.
        new_tokens: Greatest number of new tokens.
        on_cancel: Called when the caller cancels the generation.

    Attributes:
        created: Time when the prompt was submitted, from `time.perf_counter`.
        queued_s: Seconds that the prompt waited until the model began to read it; 0 until then.
        prefill_s: Seconds from the end of the wait to the first generated token.
        reused_tokens: Number of prompt tokens whose keys and values came from an earlier prompt.
    """

    def __init__(
        self, ids: Sequence[int], options: GenerationOptions, new_tokens: int, on_cancel: Callable[[], None]
    ) -> None:
        self.ids = list(ids)
        self.options = options
        self.new_tokens = new_tokens
        self.queued_s = self.prefill_s = 0.0
        self.reused_tokens = 0
        self.cancelled = False
        self.finished = False
        self._on_cancel = on_cancel
        self._lock = threading.Lock()
        self._tokens: list[Token] = []
        self._error: BaseException | None = None
        self._wake: Callable[[], None] | None = None
        self.created = time.perf_counter()
        self._started = 0.0

    def cancel(self) -> None:
        """Cancel the generation. Its row is released before the next decoding step, and the iteration ends after the existing tokens."""
        if not self.finished:
            self.cancelled = True
            self._on_cancel()

    # The scheduler calls the methods below.

    def begin(self) -> None:
        """Record the time at which the model begins to read the prompt."""
        self._started = time.perf_counter()
        self.queued_s = self._started - self.created

    def put(self, token: Token) -> None:
        """Add a generated token."""
        if not self.prefill_s:
            self.prefill_s = time.perf_counter() - self._started
        self._add([token], last=token.finish is not None)

    def end(self, error: BaseException | None = None) -> None:
        """End a generation that was cancelled or failed, without a last token."""
        self._error = error
        self._add([], last=True)

    def _add(self, tokens: list[Token], *, last: bool) -> None:
        with self._lock:
            self.finished = self.finished or last
            self._tokens += tokens
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    # The consumer of the tokens calls the methods below.

    def _take_tokens(self, wake: Callable[[], None]) -> list[Token] | None:
        """Return the new tokens, or `None` after the last one. If there are no new tokens yet, `wake` is called when there are some.

        Raises:
            BaseException: The error that ended the generation.
        """
        with self._lock:
            tokens, self._tokens = self._tokens, []
            if not tokens and self.finished:
                if self._error is not None:
                    raise self._error
                return None
            self._wake = None if tokens else wake
            return tokens

    def __iter__(self) -> Iterator[Token]:
        try:
            ready = threading.Event()
            while (tokens := self._take_tokens(ready.set)) is not None:
                if not tokens:
                    ready.wait()
                ready.clear()
                yield from tokens
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Token]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        try:
            while (tokens := self._take_tokens(lambda: _from_thread(loop, ready))) is not None:
                if not tokens:
                    await ready.wait()
                ready.clear()
                for token in tokens:
                    yield token
        finally:
            self.cancel()


def _from_thread(loop: asyncio.AbstractEventLoop, ready: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(ready.set)
    except RuntimeError:
        # The event loop is closed, so no caller waits for tokens.
        return
