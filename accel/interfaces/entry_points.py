"""Entry points of installed packages. They list backends, tasks and families without importing them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Literal

Part = Literal["backends", "tasks", "families"]


def group_of(part: Part) -> str:
    """Return the name of the entry point group in `pyproject.toml` for backends, tasks or families."""
    return f"accel.{part}"


def entry_points(part: Part) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points of all installed backends, tasks or families.

    The result is cached until a folder of `sys.path` changes, because reading entry points takes 7 ms and loading a model reads them
    four times.
    """
    return _entries(metadata.entry_points, group_of(part), tuple((folder, _changed(folder)) for folder in sys.path))


@functools.lru_cache(maxsize=3)
def _entries(
    read: Callable[..., Iterable[metadata.EntryPoint]], group: str, _folders: tuple[tuple[str, float], ...]
) -> tuple[metadata.EntryPoint, ...]:
    return tuple(read(group=group))


def _changed(folder: str) -> float:
    """Return the modification time of a folder of `sys.path`, or 0 if the folder does not exist."""
    try:
        return Path(folder).stat().st_mtime
    except OSError:
        return 0.0
