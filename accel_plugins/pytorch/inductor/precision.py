"""Copies of a model with a smaller data type or quantized layers; the original weights are not changed."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch

from accel.capture import quiet
from accel.errors import ConfigError, PrepareError

from .float8 import round_layers
from .weight_only import pack_layers

HALF = (torch.float16, torch.bfloat16)
"""Floating-point data types of 16 bits."""

_EXTRA = 'pip install "accel-transformers[inductor]"'


def computing_copy(model: Any, *, dtype: torch.dtype | None, quantization: str | None) -> Any:
    """Return a copy of the model in `dtype` with quantized linear layers, or the model itself if nothing changes.

    Modules that transformers keeps in float32 stay in float32. Buffers that are not saved in checkpoints (such as the
    tables of rotary embeddings) keep their data type.

    Raises:
        ConfigError: The quantization is not installed or does not support this device.
        PrepareError: The quantization failed.
    """
    own_dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if quantization is not None:
        check_quantization(quantization, next(model.parameters()).device, dtype or own_dtype)
    if dtype in (None, own_dtype) and quantization is None:
        return model
    computing = copy.deepcopy(model).requires_grad_(False)
    in_float32 = {
        module_name
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for module_name in (getattr(model, name, None) or ())
    }
    if dtype not in (None, own_dtype):
        for path, module in computing.named_modules():
            if in_float32 & set(path.split(".")):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_floating_point() and name not in in_float32:
                    parameter.data = parameter.data.to(dtype)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                    module._buffers[name] = buffer.to(dtype)
    if quantization is not None:
        quantize_layers(computing, quantization)
    return computing


def check_quantization(scheme: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise if a quantization scheme is not installed or does not support this device and data type.

    Raises:
        ConfigError: The scheme cannot be used; the message contains a solution.
    """
    if scheme == "int8" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"quantization={scheme!r} needs the package torchao, which is not installed.", fix=_EXTRA)
    if scheme == "int8" and device.type == "cuda":
        raise ConfigError(
            "quantization='int8' is not supported on GPUs. The int8 matrix product of torchao needs at least 17 rows and sizes that "
            "are multiples of 8, so the last layers of most models cannot be compiled.",
            fix="use quantization='float8', or leave quantization out and pass dtype='float16'.",
        )
    if scheme == "int4":
        if device.type != "cuda":
            raise ConfigError(
                f"quantization='int4' is supported only on NVIDIA GPUs, not on {device}.",
                fix="use quantization='int8'.",
            )
        if dtype not in HALF:
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"quantization='int4' needs activations in float16 or bfloat16, but the model computes in {name}.",
                fix="pass dtype='float16' (with a backend: session_options=SessionOptions(compute_dtype='float16')).",
            )
    if scheme == "float8":
        if device.type != "cuda":
            raise ConfigError(
                f"quantization='float8' is supported only on NVIDIA GPUs, not on {device}.",
                fix="use quantization='int8'.",
            )
        if torch.cuda.get_device_capability(device) < (8, 9):
            raise ConfigError(
                "This GPU does not support float8: quantization='float8' needs compute capability 8.9 (sm_89) or higher.",
                fix="leave quantization out and pass dtype='float16'.",
            )


def quantize_layers(model: Any, scheme: str) -> None:
    """Replace linear layers of a model by quantized layers.

    Raises:
        PrepareError: The quantization failed, or the model has no layer that can be quantized.
    """
    if scheme == "int4":
        if not pack_layers(model):
            raise PrepareError(
                f"{type(model).__name__} has no linear layer that quantization='int4' supports.",
                fix="leave quantization out.",
            )
        return
    if scheme == "float8":
        if not round_layers(model):
            raise PrepareError(
                f"{type(model).__name__} has no linear layer that would be faster in float8.",
                fix="leave quantization out.",
            )
        return
    try:
        with quiet():
            # torchao is imported inside `quiet`, because the import logs warnings about kernels for other devices.
            from torchao import quantization

            quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    except Exception as error:
        raise PrepareError(
            f"torchao cannot quantize {type(model).__name__} to {scheme}: {error}", fix="leave quantization out."
        ) from error
