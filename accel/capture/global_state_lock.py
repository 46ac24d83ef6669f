"""Lock for library code that changes global state of the process, such as PyTorch's tracers and transformers' exporters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..interfaces.fork_safety import at_fork

_lock = threading.RLock()


def _renew() -> None:
    global _lock
    # After a fork, the thread that held the lock does not exist in the child process.
    _lock = threading.RLock()


at_fork(after_in_child=_renew)


@contextmanager
def one_thread_at_a_time() -> Iterator[None]:
    """Let only one thread load, trace or compile a model at a time. Other threads wait. The function can be used as a decorator.

    During these operations, libraries replace functions of torch and change global flags, and restore the original functions at the
    end. Without the lock, a second thread could save a replaced function as the original function, and restore the wrong function.
    """
    with _lock:
        yield
