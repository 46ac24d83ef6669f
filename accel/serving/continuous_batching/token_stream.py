"""One prompt's answer while it is generated: the scheduler's thread puts tokens in, a caller takes them out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ...decoding.generation_options import GenerationOptions

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer.

    Attributes:
        id: Its number in the vocabulary.
        finish: On the last one, why: the model or a stop string ended it (`stop`), or there were enough (`length`).
    """

    id: int
    finish: Finish | None = None


class Generation:
    """The answer to one prompt: iterate over its tokens, with `for` from a thread or `async for` from an event loop, once.

    Args:
        ids: The prompt.
        options: How to continue it.
        new_tokens: Tokens at most.
        on_cancel: Called when the caller gives the rest up.

    Attributes:
        created: When it was submitted, by `time.perf_counter`.
        queued_s: Seconds until its prompt began to be read; 0 while it waits.
        prefill_s: Seconds from then to its first token.
    """

    def __init__(
        self, ids: Sequence[int], options: GenerationOptions, new_tokens: int, on_cancel: Callable[[], None]
    ) -> None:
        self.ids = list(ids)
        self.options = options
        self.new_tokens = new_tokens
        self.queued_s = self.prefill_s = 0.0
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
        """Give up the rest: the row is free before the next step, and iterating ends after the tokens that are there."""
        if not self.finished:
            self.cancelled = True
            self._on_cancel()

    # The scheduler's side

    def begin(self) -> None:
        """Note that the prompt is being read."""
        self._started = time.perf_counter()
        self.queued_s = self._started - self.created

    def put(self, token: Token) -> None:
        """Add a token."""
        if not self.prefill_s:
            self.prefill_s = time.perf_counter() - self._started
        self._add([token], last=token.finish is not None)

    def end(self, error: BaseException | None = None) -> None:
        """End without a last token: cancelled, or failed."""
        self._error = error
        self._add([], last=True)

    def _add(self, tokens: list[Token], *, last: bool) -> None:
        with self._lock:
            self.finished = self.finished or last
            self._tokens += tokens
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    # The caller's side

    def _taken(self, wake: Callable[[], None]) -> list[Token] | None:
        """The tokens that came, or `None` after the last one; `wake` is called when more come where there are none.

        Raises:
            BaseException: The error that ended the answer.
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
            while (tokens := self._taken(ready.set)) is not None:
                if not tokens:
                    ready.wait()
                ready.clear()
                yield from tokens
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Token]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        try:
            while (tokens := self._taken(lambda: _from_thread(loop, ready))) is not None:
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
        # The loop is closed, so no caller waits.
        return
