"""Functions that run when a process forks, on systems where processes fork."""

from __future__ import annotations

import os
from collections.abc import Callable


def at_fork(*, before: Callable[[], object] | None = None, after_in_child: Callable[[], object] | None = None) -> None:
    """Register functions for every later fork. Does nothing on systems without fork, such as Windows.

    Args:
        before: Called in the parent.
        after_in_child: Called in the child.
    """
    if not hasattr(os, "register_at_fork"):
        return
    given = {"before": before, "after_in_child": after_in_child}
    os.register_at_fork(**{name: hook for name, hook in given.items() if hook is not None})
