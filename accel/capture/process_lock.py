"""One thread at a time where libraries change the whole process: PyTorch's tracers and compiler, transformers' loading and exporters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..interfaces.fork_hooks import at_fork

_lock = threading.RLock()
# The thread that held it is none of a child's.
at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


@contextmanager
def alone() -> Iterator[None]:
    """Load, trace or compile inside, or in a function that this decorates; another thread that is about to waits until the end.

    Meanwhile libraries replace functions of torch and flags of the process. Of two threads at once, the second would take what the
    first has put there for what was there before, and leave it.
    """
    with _lock:
        yield
