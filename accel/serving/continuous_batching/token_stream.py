"""One prompt's answer while it is made: what the scheduler's thread puts in, and a caller takes out."""

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
        on_cancel: Called when nobody wants it any more.

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
        self._items: list[Token | BaseException] = []
        self._wake: Callable[[], None] | None = None
        self.created = time.perf_counter()
        self._started = 0.0

    def cancel(self) -> None:
        """Nobody wants the rest: its row is free before the next step. Iterating ends with the tokens that are there."""
        if not self.finished:
            self.cancelled = True
            self._on_cancel()

    # The scheduler's side

    def begin(self) -> None:
        """Its prompt is being read."""
        self._started = time.perf_counter()
        self.queued_s = self._started - self.created

    def put(self, token: Token) -> None:
        """One more token."""
        if not self.prefill_s:
            self.prefill_s = time.perf_counter() - self._started
        self._put(token, last=token.finish is not None)

    def end(self, error: BaseException | None = None) -> None:
        """No more come: cancelled, or failed."""
        self._put(error if error is not None else StopIteration(), last=True)

    def _put(self, item: Token | BaseException, *, last: bool) -> None:
        with self._lock:
            self.finished = self.finished or last
            self._items.append(item)
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    # The caller's side

    def _taken(self, wake: Callable[[], None]) -> list[Token | BaseException]:
        with self._lock:
            items, self._items = self._items, []
            self._wake = None if items else wake
            return items

    def __iter__(self) -> Iterator[Token]:
        try:
            while True:
                ready = threading.Event()
                items = self._taken(ready.set)
                if not items:
                    ready.wait()
                for item in items:
                    if isinstance(item, StopIteration):
                        return
                    if isinstance(item, BaseException):
                        raise item
                    yield item
                    if item.finish is not None:
                        return
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Token]:
        loop = asyncio.get_running_loop()
        try:
            while True:
                ready = asyncio.Event()
                items = self._taken(lambda ready=ready: _from_thread(loop, ready))  # type: ignore[misc]
                if not items:
                    await ready.wait()
                for item in items:
                    if isinstance(item, StopIteration):
                        return
                    if isinstance(item, BaseException):
                        raise item
                    yield item
                    if item.finish is not None:
                        return
        finally:
            self.cancel()


def _from_thread(loop: asyncio.AbstractEventLoop, ready: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(ready.set)
    except RuntimeError:
        # The loop is closed: nobody waits.
        return
