"""One thread at a time where libraries change the whole process: PyTorch's tracers and compiler, transformers' loading and exporters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..interfaces.forks import at_fork

_lock = threading.RLock()
# A child process does not have the thread that held it.
at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


@contextmanager
def one_thread_at_a_time() -> Iterator[None]:
    """Load, trace or compile inside, or in a function that this decorates; another thread waits until the end.

    Libraries replace functions of torch and flags of the process meanwhile. A second thread would take the replacements of the first for
    the originals, and would restore them.
    """
    with _lock:
        yield
