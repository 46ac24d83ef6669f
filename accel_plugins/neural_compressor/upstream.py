"""Private and version-dependent APIs of Neural Compressor, wrapped in functions, with its log output hidden and its
errors converted.

Tested with neural-compressor-pt 3.10; tests/backends/test_neural_compressor.py runs all of them.

| name | reason | public alternative |
|---|---|---|
| `common.options.workspace` | the import creates a folder in the current folder | `set_workspace`, after the import |
| `INC_TARGET_DEVICE`, `auto_accelerator.auto_detect_accelerator` | with a GPU, it moves parts of the model to it, but no data | none |
| `algorithms.weight_only.gptq.trace_gptq_target_blocks`, `utility.get_block_prefix` | the blocks that GPTQ and AWQ call | none |
| `algorithms.weight_only.utility.GraphTrace` | whether TEQ finds a norm to scale | none |
| `algorithms.weight_only.modules.INCWeightOnlyLinear`, `MulLinear` | packed weights | `save`, in its own format |
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from accel.capture import first_lines, quiet
from accel.errors import AccelError, QuantizeError

_DEVICE, _DETECTING = "INC_TARGET_DEVICE", "neural_compressor.torch.utils.auto_accelerator"


def library() -> ModuleType:
    """Import and return `neural_compressor.torch.quantization`.

    Raises:
        QuantizeError: Neural Compressor cannot be imported.
    """
    try:
        with quiet(), _on_the_host(), warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="accel-") as folder:
            warnings.simplefilter("ignore")
            from neural_compressor.common import options

            # Only layer-wise quantization writes to this folder, and accel does not use layer-wise quantization.
            options.workspace = folder
            from neural_compressor.torch import quantization
    # The import looks for accelerators and may raise any exception.
    except Exception as error:
        raise QuantizeError(
            f"Neural Compressor cannot be imported: {type(error).__name__}: {error}.",
            fix='pip install "accel-transformers[neural-compressor]"',
        ) from error
    module: ModuleType = quantization
    return module


@contextmanager
def mapped(step: str, fix: str) -> Iterator[None]:
    """Context manager that turns Neural Compressor's errors into errors of `accel` and hides its tables and progress
    bars.

    Raises:
        QuantizeError: Neural Compressor failed; its message is included.
    """
    logger = logging.getLogger("neural_compressor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with quiet(), _on_the_host(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except AccelError:
        raise
    # The algorithms run model code and check few of their inputs, so any exception may occur.
    except Exception as error:
        raise QuantizeError(
            f"Neural Compressor failed during {step}: {type(error).__name__}: {first_lines(error, 1)}", fix=fix
        ) from error
    finally:
        logger.setLevel(level)


@contextmanager
def _on_the_host() -> Iterator[None]:
    """Context manager in which Neural Compressor finds no accelerator. Neural Compressor caches the detected device, so
    its cache is cleared.
    """
    before = os.environ.get(_DEVICE)
    os.environ[_DEVICE] = "cpu"
    _forget_device()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DEVICE]
        else:
            os.environ[_DEVICE] = before
        _forget_device()


def _forget_device() -> None:
    if _DETECTING in sys.modules:
        sys.modules[_DETECTING].auto_detect_accelerator.cache_clear()


def blocks_of(model: torch.nn.Module, algorithm: str) -> Sequence[torch.nn.Module]:
    """Return the blocks of a model that `gptq` or `awq` calls one after another."""
    from neural_compressor.torch.algorithms.weight_only import gptq, utility

    if algorithm == "gptq":
        return list(gptq.trace_gptq_target_blocks(model)["transformers"])
    blocks: Any = model.get_submodule(utility.get_block_prefix(model)[0])
    return list(blocks)


def has_norms_to_scale(model: torch.nn.Module, example: Any) -> bool:
    """Return whether the algorithm TEQ finds a normalization layer before linear layers that can absorb the scales of
    their inputs.
    """
    from neural_compressor.torch.algorithms.weight_only.utility import GraphTrace

    return bool(GraphTrace().get_absorb_to_layer(model, example, ["Linear"])[0])


def packed_layers(model: torch.nn.Module) -> dict[str, tuple[Any, torch.Tensor | None]]:
    """Return the quantized layers of Neural Compressor by name, each with the scales of its inputs or `None`.

    Raises:
        QuantizeError: A layer has input scales but no packed weights.
    """
    from neural_compressor.torch.algorithms.weight_only.modules import INCWeightOnlyLinear, MulLinear

    modules = dict(model.named_modules())
    scaled = {name: module.input_scale for name, module in modules.items() if isinstance(module, MulLinear)}
    packed: dict[str, tuple[Any, torch.Tensor | None]] = {}
    for name, module in modules.items():
        if isinstance(module, INCWeightOnlyLinear):
            outer = name.removesuffix(".linear") if name.removesuffix(".linear") in scaled else name
            packed[outer] = module, scaled.get(outer)
    if missing := scaled.keys() - packed.keys():
        raise QuantizeError(
            f"Neural Compressor scaled the inputs of the layer {min(missing)}, but did not quantize its weights.",
            fix="use algorithm='rtn'.",
        )
    return packed
