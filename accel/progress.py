"""Progress of long work, told to whoever listens: the command line shows a bar, a library user sees nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and how much there is (`None`: not known)."""

_listener: ContextVar[Listener | None] = ContextVar("accel_progress", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send the progress made inside the block to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(what: str, done: int = 0, total: int | None = None) -> None:
    """Tell the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(what, done, total)


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Pass the items on, reporting each one when it is done."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    report(what, 0, total)
    for done, item in enumerate(items, start=1):
        yield item
        report(what, done, total)
