"""One callable through PyTorch's compiler: whole, for one shape, never compiled again, never eager without a word."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import logging
import os
import shutil
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from accel.artifact import accel_home
from accel.capture import one_thread_at_a_time, quiet
from accel.errors import ConfigError

logger = logging.getLogger(__name__)

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# What a compiler needs for one form at most, about; with less it fails in the middle.
_ROOM_BYTES = 64 << 20
_NAMES = itertools.count()
REMEDIES = {
    "cpu": "install a C++ compiler, such as `apt-get install g++`, or name one in CXX",
    "cuda": "install triton, which PyTorch's builds for GPUs bring along",
}
"""What makes code for each type of device compilable."""


def cpu_compiler() -> str | None:
    """The C++ compiler that code for the host is compiled with, or `None`."""
    from torch._inductor import config, cpp_builder

    with contextlib.suppress(Exception):
        return str(cpp_builder.get_cpp_compiler()) if config.cpp.cxx else None
    return None


def gpu_compiler() -> bool:
    """Whether code for GPUs can be compiled."""
    return importlib.util.find_spec("triton") is not None


def keep_compiled_code() -> None:
    """Compiled code is kept in our home, unless the user chose a place: the next process compiles the same in a part of the
    time. The compiler's own key has the graph, the versions, the processor and its settings.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # The compiler itself sets the variable when it is first asked for its folder.
    if os.environ.get(_CACHE) in (None, default_cache_dir()):
        try:
            kept = accel_home() / "inductor"
            kept.mkdir(parents=True, exist_ok=True)
            if not os.access(kept, os.W_OK):
                raise PermissionError(f"{kept} cannot be written")
            if shutil.disk_usage(kept).free < _ROOM_BYTES:
                raise OSError(f"the disk of {kept} is full")
        except (OSError, ConfigError) as error:
            _tell_not_kept(str(error))
            return
        os.environ[_CACHE] = str(kept)


@functools.cache
def _tell_not_kept(why: str) -> None:
    logger.warning(
        "compiled code is not kept for later processes: %s Fix: set ACCEL_HOME to a folder that can be written.",
        why.partition("\n")[0],
    )


@contextlib.contextmanager
def _unsaid(name: str) -> Iterator[None]:
    """Nothing of a logger, errors included."""
    one = logging.getLogger(name)
    level = one.level
    one.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        one.setLevel(level)


@contextlib.contextmanager
def compiling(*, freezing: bool) -> Iterator[None]:
    """How code is compiled inside."""
    import torch._dynamo.config
    import torch._inductor.config
    from transformers.utils.logging import warning_once

    keep_compiled_code()
    with (
        one_thread_at_a_time(),
        quiet(),
        _unsaid("torch._dynamo.metrics_context"),
        torch._inductor.config.patch(freezing=freezing),
        torch._dynamo.config.patch(
            suppress_errors=False,
            fail_on_recompile_limit_hit=True,
            # What models warn with. PyTorch 2.11 cannot write functions into its metrics, and says so.
            ignore_logging_functions={warning_once},
        ),
    ):
        yield


def compiled(
    function: Callable[..., Any],
    *,
    dynamic: bool = False,
    replayed: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The function through the compiler; it is compiled in its first call, inside `compiling`.

    A graph break is an error (`fullgraph`). Guards are left out: whoever calls it holds the sizes, types and settings that it
    was compiled for, and never calls it with others.

    Args:
        function: What to compile.
        dynamic: Whether sizes may vary.
        replayed: Let the compiler record CUDA graphs itself, for functions that change their inputs in place.
        options: More of the compiler's own.
    """
    options = dict(options or {})
    if not dynamic:
        options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
    if replayed:
        options["triton.cudagraphs"] = True

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # The compiler keeps what it made by code object, and a limited number of them: each form gets its own.
    code = call.__code__.replace(co_name=f"form_{next(_NAMES)}")
    own = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    made = torch.compile(own, fullgraph=True, dynamic=dynamic, options=options)
    weakref.finalize(made, _forget, code).atexit = False
    return made


def _forget(code: types.CodeType) -> None:
    """Let the compiler let go of what it made of a function, and of the weights in it: it keeps both while the process runs.

    Weights stand in modules that it lists and never looks up again; those of other functions are held by these functions.
    """
    codecache = sys.modules.get("torch._inductor.codecache")
    if codecache is not None:
        torch._C._dynamo.eval_frame.reset_code(code)
        listed = codecache.PyCodeCache.modules
        # Other threads may compile, or let go, meanwhile.
        for module in list(listed):
            sys.modules.pop(module.__name__, None)
            with contextlib.suppress(ValueError):
                listed.remove(module)
