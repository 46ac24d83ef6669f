"""Handling of forked processes. A child process inherits the runtime objects of its parent, but not the threads of these objects.

A destructor of a runtime object in the child would wait forever for threads that do not exist in the child, or would abort the child.
So a child process never destroys inherited objects, and accel releases torch's threads before a fork. ONNX Runtime 1.31 also hangs
if it was imported before the fork and the child ends with `sys.exit`. Children of `multiprocessing` do not hang, because they end
without exit handlers.
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
    """Register functions that run at every later fork. They never run on systems without fork, such as Windows.

    Args:
        before: Function that runs in the parent before the fork.
        after_in_child: Function that runs in the child after the fork.
    """
    if not hasattr(os, "register_at_fork"):
        return
    hooks = {"before": before, "after_in_child": after_in_child}
    os.register_at_fork(**{name: hook for name, hook in hooks.items() if hook is not None})


def kept_in_children(runtime_object: Object) -> Object:
    """Register a runtime object so that no forked child process destroys the object. Return the same object.

    Args:
        runtime_object: Object with its own threads, such as a session or a compiled model. It must support weak references.
    """
    _live[id(runtime_object)] = runtime_object
    return runtime_object


def never_destroyed(inherited: object) -> None:
    """Keep an object until the process ends, even while the interpreter shuts down."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


def _before() -> None:
    # A child would wait for torch's OpenMP worker threads, which exist only in the parent. This call ends the worker threads, and the
    # parent and the child start new threads when they need them.
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None) if sys.platform == "linux" else None
    if pause is not None:
        pause(_OMP_PAUSE_SOFT)


def _in_child() -> None:
    # The dictionary also contains objects in reference cycles, which the garbage collector could destroy later.
    for inherited in list(_live.values()):
        never_destroyed(inherited)
    _live.clear()


at_fork(before=_before, after_in_child=_in_child)
