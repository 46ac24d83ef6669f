"""Compilation of a function for one input shape: as a whole, without graph breaks, and only once."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import logging
import os
import shutil
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from accel.artifact import accel_home
from accel.capture import one_thread_at_a_time, quiet
from accel.errors import ConfigError

from ..upstream import compiler_settings, default_code_folder, release_code

logger = logging.getLogger(__name__)

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# Approximate free disk space in bytes that the compilation of one form needs.
_ROOM_BYTES = 64 << 20
_NAMES = itertools.count()
REMEDIES = {
    "cpu": "install a C++ compiler (such as `apt-get install g++`), or set the environment variable CXX to the path of a compiler",
    "cuda": "install a build of PyTorch for NVIDIA GPUs, which includes Triton",
}
"""Instructions to install a compiler, by device type."""


def gpu_compiler() -> bool:
    """Return whether code for GPUs can be compiled, which requires Triton."""
    return importlib.util.find_spec("triton") is not None


def keep_compiled_code() -> None:
    """Make PyTorch's compiler store its code cache in the `accel` home folder, unless the user chose another folder.
    Later processes then compile the same model faster.

    The key of a cache entry contains the graph, the software versions, the processor and the compiler settings.
    """
    if os.environ.get(_CACHE) in (None, default_code_folder()):
        try:
            folder = accel_home() / "inductor"
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(f"the folder {folder} is not writable")
            if shutil.disk_usage(folder).free < _ROOM_BYTES:
                raise OSError(f"the disk of the folder {folder} is full")
        except (OSError, ConfigError) as error:
            _tell_not_kept(str(error))
            return
        os.environ[_CACHE] = str(folder)


@functools.cache
def _tell_not_kept(why: str) -> None:
    logger.warning(
        "Compiled code cannot be stored for later processes: %s.\nFix: set the environment variable ACCEL_HOME to a folder that is "
        "writable and has free disk space.",
        why.partition("\n")[0].rstrip("."),
    )


@contextlib.contextmanager
def compiling(*, freezing: bool) -> Iterator[None]:
    """Return a context manager inside of which code is compiled. Only one thread at a time can enter the context."""
    from transformers.utils.logging import warning_once

    keep_compiled_code()
    # The code of models logs with `warning_once`. The compiler leaves calls of this function out of the compiled code.
    settings = compiler_settings(freezing=freezing, ignored_calls=(warning_once,))
    with one_thread_at_a_time(), quiet(), settings:
        yield


def compiled(
    function: Callable[..., Any],
    *,
    replayed: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return a compiled version of a function. The compilation happens in its first call, which must be inside
    `compiling`.

    A graph break raises an error (`fullgraph`). The compiled code does not check its inputs (no guards): the caller
    must pass inputs with the same sizes, types and settings as in the first call.

    Args:
        function: The function to compile.
        replayed: Whether PyTorch's compiler records the CUDA graphs. Required for functions that change their inputs in
            place.
        options: Additional compiler options.
    """
    options = {**(options or {}), "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    if replayed:
        options["triton.cudagraphs"] = True

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # PyTorch limits the number of compilations per code object, so each compiled function gets its own code object.
    code = call.__code__.replace(co_name=f"form_{next(_NAMES)}")
    form = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    compiled_form = torch.compile(form, fullgraph=True, dynamic=False, options=options)
    weakref.finalize(compiled_form, release_code, code).atexit = False
    return compiled_form
