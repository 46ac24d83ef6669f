"""Progress of long operations, sent to a listener. The command line shows a progress bar; library users see nothing by
default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[str, int, int | None], None]
"""Function called with a description, the number of finished items and the total number of items (`None` if unknown)."""

_listener: ContextVar[Listener | None] = ContextVar("accel_progress", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send progress within the block to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(description: str, done: int = 0, total: int | None = None) -> None:
    """Send progress to the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(description, done, total)


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, and report progress after each item."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    report(description, 0, total)
    for done, item in enumerate(items, start=1):
        yield item
        report(description, done, total)
