"""Options of the CUDA backend: accel's own options, and ONNX Runtime's options of its CUDA provider."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from accel.errors import ConfigError, did_you_mean
from accel.interfaces.specs import DeviceSpec

from ..ortkit.runtime.nvidia import CUDA, check_option_names, device_index

Padding = Literal["check", "right", "any"]

# The list is from https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html#configuration-options
PROVIDER_OPTIONS = (
    "arena_extend_strategy",
    "cudnn_conv1d_pad_to_nc1d",
    "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace",
    "device_id",
    "do_copy_in_default_stream",
    "enable_skip_layer_norm_strict_mode",
    "fuse_conv_bias",
    "gpu_mem_limit",
    "prefer_nhwc",
    "sdpa_kernel",
    "tunable_op_enable",
    "tunable_op_max_tuning_duration_ms",
    "tunable_op_tuning_enable",
    "use_tf32",
)
OWN_OPTIONS = ("cuda_graphs", "packing", "padding")
_TAKEN = {
    "enable_cuda_graph": "use cuda_graphs=0 to turn CUDA graphs off.",
    "user_compute_stream": "leave user_compute_stream out: accel orders calls on torch's current stream.",
}
_TRUE, _FALSE = ("1", "true"), ("0", "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """Options of the CUDA backend after validation.

    Attributes:
        cuda_graphs: The maximum number of input shapes with a CUDA graph; 0 disables CUDA graphs. A CUDA graph replays
            all kernels of a run with one launch. Its buffers stay allocated.
        padding: The assumption about the padding mask. `check`: inspect each call's mask and use the fastest kernels
            that are correct for it. `right`: assume that every row starts with at least one token and has padding only
            on the right; results are wrong if this is not true. `any`: never inspect the mask, and always use the
            general kernels.
        packing: Whether calls with much padding on the right are computed without the padding. Applies only with
            `check`.
        tf32: Whether float32 matrix products may round their inputs to 10 bits of mantissa (TF32). ONNX Runtime's
            default is yes; accel's default is no.
        provider: ONNX Runtime's provider options, as strings.
    """

    cuda_graphs: int = 16
    padding: Padding = "check"
    packing: bool = True
    tf32: bool = False
    provider: Mapping[str, str] = field(default_factory=dict)


def read_options(options: Mapping[str, object], device: DeviceSpec) -> CudaOptions:
    """Check the names and values of options.

    Raises:
        ConfigError: An option does not exist, a value is invalid, or `device_id` differs from the device.
    """
    option_names = (*PROVIDER_OPTIONS, *OWN_OPTIONS)
    check_option_names(options, option_names, _TAKEN, CUDA)
    index = device_index(options, device)
    padding = str(options.get("padding", "check"))
    if padding not in get_args(Padding):
        raise ConfigError(
            f"padding is {padding!r}, which is not a known mode.{did_you_mean(padding, get_args(Padding))}",
            fix=f"use one of {', '.join(get_args(Padding))}.",
        )
    tf32 = _truth("use_tf32", options.get("use_tf32", False))
    provider = {
        name: _provider_value(value)
        for name, value in options.items()
        if name not in OWN_OPTIONS and name != "use_tf32"
    }
    return CudaOptions(
        cuda_graphs=_integer("cuda_graphs", options.get("cuda_graphs", 16)),
        padding=cast("Padding", padding),
        packing=_truth("packing", options.get("packing", True)),
        tf32=tf32,
        provider={**provider, "device_id": str(index), "use_tf32": "1" if tf32 else "0"},
    )


def _provider_value(value: object) -> str:
    return ("1" if value else "0") if isinstance(value, bool) else str(value)


def _integer(name: str, value: object) -> int:
    text = str(value)
    if not text.isdigit():
        raise ConfigError(
            f"{name} is {value!r}; expected a whole number of at least 0.", fix=f"use a number, such as {name}=16."
        )
    return int(text)


def _truth(name: str, value: object) -> bool:
    text = str(value).lower()
    if text not in (*_TRUE, *_FALSE):
        raise ConfigError(f"{name} is {value!r}; expected True or False.", fix=f"use {name}=True or {name}=False.")
    return text in _TRUE
