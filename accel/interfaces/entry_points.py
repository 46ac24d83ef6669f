"""Entry points of installed distributions: how backends, tasks and families are listed without importing them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

BACKENDS = "accel.backends"
TASKS = "accel.tasks"
FAMILIES = "accel.families"


def entry_points(group: str) -> tuple[metadata.EntryPoint, ...]:
    """The entry points of a group, read again after an installation changed a folder of `sys.path`.

    Reading takes 7 ms, and opening a model asks four times.
    """
    return _entries(metadata.entry_points, group, tuple((folder, _changed(folder)) for folder in sys.path))


@functools.lru_cache(maxsize=3)
def _entries(
    read: Callable[..., Iterable[metadata.EntryPoint]], group: str, _folders: tuple[tuple[str, float], ...]
) -> tuple[metadata.EntryPoint, ...]:
    return tuple(read(group=group))


def _changed(folder: str) -> float:
    """Time of the last change of a folder of `sys.path`; 0 where there is none."""
    try:
        return Path(folder).stat().st_mtime
    except OSError:
        return 0.0
