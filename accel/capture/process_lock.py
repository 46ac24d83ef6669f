"""A lock for library code that changes the whole process: PyTorch's tracers and compiler, transformers' loading and exporters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..interfaces.forks import at_fork

_lock = threading.RLock()


def _renew() -> None:
    global _lock
    # After a fork, the thread that held the lock does not exist in the child process.
    _lock = threading.RLock()


at_fork(after_in_child=_renew)


@contextmanager
def one_thread_at_a_time() -> Iterator[None]:
    """Let only one thread load, trace or compile at a time. Other threads wait. Usable as a decorator.

    Meanwhile, libraries replace functions of torch and global flags. Without the lock, a second thread would take the first
    thread's replacements for the originals and restore them.
    """
    with _lock:
        yield
