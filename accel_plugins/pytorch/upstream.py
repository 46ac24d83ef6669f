"""Private and version-dependent APIs of PyTorch, wrapped in functions. The compiler is imported inside the functions:
its import takes a second.

Tested with torch 2.11 to 2.15. tests/backends/test_pytorch_upstream.py calls these APIs on the installed version;
tests/backends/test_cuda_upstream.py calls the APIs for GPUs.

| name | reason | public alternative |
|---|---|---|
| `torch._C._cuda_clearCublasWorkspaces` | PyTorch's own compiler calls it around its CUDA graphs (pytorch/pytorch#193402) | none |
| `torch._C._cuda_getCurrentRawStream` | creating a stream object takes 7 microseconds | `torch.cuda.current_stream().cuda_stream` |
| `torch._foreach_copy_` | one launch for all inputs of a CUDA graph | `Tensor.copy_` for each |
| `torch._scaled_mm` | matrix product of float8 tensors with a bias | `torch.nn.functional.scaled_mm`, without bias in 2.11 |
| `torch._addmm_activation` | matrix product, bias and activation in one cuBLAS kernel | none |
| `torch._fake_quantize_learnable_per_tensor_affine`, `..._per_channel_affine` | rounding with learned scales | none with gradients |
| `torch.utils._pytree` | nested outputs as lists of tensors, in the order of `torch.export` | none |
| `torch.utils._python_dispatch.is_traceable_wrapper_subclass` | detects quantized weights | none |
| `torch._inductor.aoti_compile_and_package`, `aoti_load_package` | documented under these names | none |
| `torch._C._aoti.AOTIModelPackageLoader` | reads a package's metadata without loading its code | none |
| `torch._inductor.cpp_builder.get_cpp_compiler`, `config.cpp.cxx` | the C++ compiler for the CPU | none |
| `torch._inductor.runtime.cache_dir_utils.default_cache_dir` | tells whether the user chose the code cache folder | none |
| `torch._inductor.config.patch`, `torch._dynamo.config.patch` | settings for one compilation | `torch.compile(options=...)`, some |
| `torch._dynamo.metrics_context` | name of a logger that reports false errors (2.11) | none |
| `torch._C._dynamo.eval_frame.reset_code`, `_inductor.codecache.PyCodeCache` | release one function's code | `torch.compiler.reset`, all |
| `Tensor._dynamo_static_input_type`, `torch._dynamo.mark_static_address` | tensors at fixed addresses for CUDA graphs | none |
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils import _python_dispatch, _pytree

tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_leaves, tree_map_only = _pytree.tree_leaves, _pytree.tree_map_only
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
copy_all = torch._foreach_copy_
scaled_product = torch._scaled_mm
activated_product = torch._addmm_activation
rounded_by_tensor = torch._fake_quantize_learnable_per_tensor_affine
rounded_by_channel = torch._fake_quantize_learnable_per_channel_affine


def clear_cublas_workspaces() -> None:
    """Release the GPU memory that PyTorch reserves as a workspace of cuBLAS for each stream."""
    torch._C._cuda_clearCublasWorkspaces()


def current_stream_number(index: int) -> int:
    """Return the handle of PyTorch's current stream on the GPU with this index."""
    number: int = torch._C._cuda_getCurrentRawStream(index)
    return number


def compile_package(program: Any, file: Path) -> None:
    """Compile an exported program and write code and weights into a `.pt2` file."""
    torch._inductor.aoti_compile_and_package(program, package_path=str(file))


def load_package(file: Path) -> Any:
    """Load a package. The `run` method of the result takes and returns flat lists of tensors."""
    return torch._inductor.aoti_load_package(str(file)).loader


def package_metadata(file: Path) -> dict[str, str]:
    """Return the metadata that the compiler wrote into a package: the device and CPU instruction set."""
    from torch._C import _aoti

    loader: Any = _aoti.AOTIModelPackageLoader
    return dict(loader.load_metadata_from_package(str(file), "model"))


def cpp_compiler() -> str | None:
    """Return the C++ compiler for CPU code, or `None` if there is none."""
    from torch._inductor import config, cpp_builder

    with suppress(Exception):
        return str(cpp_builder.get_cpp_compiler()) if config.cpp.cxx else None
    return None


def default_code_folder() -> str:
    """Return the compiler's default folder for its code cache.

    If the environment variable `TORCHINDUCTOR_CACHE_DIR` is not set, the compiler uses this folder and sets the
    variable to it.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return str(default_cache_dir())


@contextmanager
def compiler_settings(*, freezing: bool, ignored_calls: Sequence[Any]) -> Iterator[None]:
    """Return a context manager with compiler settings: a function is compiled as a whole, or compilation raises.

    Args:
        freezing: Whether weights become constants of the compiled code.
        ignored_calls: Logging functions whose calls are left out of the compiled code.
    """
    import torch._dynamo.config
    import torch._inductor.config

    # PyTorch 2.11 logs a false error because it cannot write functions into its metrics.
    metrics = logging.getLogger("torch._dynamo.metrics_context")
    level = metrics.level
    metrics.setLevel(logging.CRITICAL)
    try:
        with (
            torch._inductor.config.patch(freezing=freezing),
            torch._dynamo.config.patch(
                suppress_errors=False,
                fail_on_recompile_limit_hit=True,
                ignore_logging_functions={*ignored_calls},
            ),
        ):
            yield
    finally:
        metrics.setLevel(level)


def release_code(code: types.CodeType) -> None:
    """Release the compiled code of a function and the weights in the code, which PyTorch would keep until the process
    ends.

    The list `PyCodeCache.modules` contains all modules with compiled code and keeps their weights alive. PyTorch never
    reads this list, so this function empties it. Modules of other functions stay alive, because these functions refer
    to them.
    """
    codecache = sys.modules.get("torch._inductor.codecache")
    if codecache is not None:
        torch._C._dynamo.eval_frame.reset_code(code)
        modules = codecache.PyCodeCache.modules
        # Iterate over a copy of the list, because other threads may change the list at the same time.
        for module in list(modules):
            sys.modules.pop(module.__name__, None)
            with suppress(ValueError):
                modules.remove(module)


def keep_address(tensor: torch.Tensor) -> None:
    """Make the compiler treat a tensor as an input of the function. On a GPU, the address of this input never changes.

    transformers marks the tensors of its static caches as tensors at a fixed address. The compiler would therefore make
    the tensors of the first cache part of the compiled code, and the code would never write to another cache.
    """
    vars(tensor).pop("_dynamo_static_input_type", None)
    if tensor.device.type == "cuda":
        torch._dynamo.mark_static_address(tensor, guard=False)
