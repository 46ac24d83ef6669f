"""Processes that are forked: a child has the objects of a runtime that its parent had, but not their threads.

What was inherited is never torn down there, and torch's own threads are let go before. Destructors would wait for threads that are
none for ever, or end the process, whether the last name goes or the collector finds the object. ONNX Runtime 1.31 also hangs where
a child ends with `sys.exit`, if only it was imported before: `multiprocessing` ends its children without exit handlers.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Object = TypeVar("Object")

_OMP_PAUSE_SOFT = 1

_live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def at_fork(*, before: Callable[[], object] | None = None, after_in_child: Callable[[], object] | None = None) -> None:
    """Register functions that run at every later fork; systems without fork, such as Windows, never call them.

    Args:
        before: Called in the parent.
        after_in_child: Called in the child.
    """
    if not hasattr(os, "register_at_fork"):
        return
    given = {"before": before, "after_in_child": after_in_child}
    os.register_at_fork(**{name: hook for name, hook in given.items() if hook is not None})


def kept_in_children(runtime_object: Object) -> Object:
    """The same object, which no process forked from this one will destroy.

    Args:
        runtime_object: What has threads of its own, a session or a compiled model; weak references to it must be possible.
    """
    _live[id(runtime_object)] = runtime_object
    return runtime_object


def never_destroyed(inherited: object) -> None:
    """Keep an object until the process has ended, and not only until its modules are taken down."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


def _before() -> None:
    # GNU's OpenMP keeps the threads of torch's last product for the next one, and waits for them in a child. Now both start new ones.
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None) if sys.platform == "linux" else None
    if pause is not None:
        pause(_OMP_PAUSE_SOFT)


def _in_child() -> None:
    # Of those that only the collector has still to find, too.
    for inherited in list(_live.values()):
        never_destroyed(inherited)
    _live.clear()


at_fork(before=_before, after_in_child=_in_child)
