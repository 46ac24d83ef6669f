"""Options of the TensorRT backend: accel's own options, and ONNX Runtime's options of its TensorRT provider."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from accel.interfaces.shape_profiles import AxisSizes, read_profile
from accel.interfaces.specs import DeviceSpec

from ..ortkit.runtime.nvidia import TENSORRT, check_option_names, device_index

# The options of ONNX Runtime 1.31's provider that users may set:
# https://onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html#configurations
PROVIDER_OPTIONS = (
    "device_id",
    "trt_auxiliary_streams",
    "trt_build_heuristics_enable",
    "trt_builder_optimization_level",
    "trt_context_memory_sharing_enable",
    "trt_cuda_graph_enable",
    "trt_detailed_build_log",
    "trt_dump_subgraphs",
    "trt_engine_hw_compatible",
    "trt_extra_plugin_lib_paths",
    "trt_force_sequential_engine_build",
    "trt_layer_norm_fp32_fallback",
    "trt_max_partition_iterations",
    "trt_max_workspace_size",
    "trt_min_subgraph_size",
    "trt_op_types_to_exclude",
    "trt_preview_features",
    "trt_sparsity_enable",
    "trt_tactic_sources",
)
_PRECISION = (
    "leave the option out: the precision comes from the graph. To change it, use accel optimize --backend tensorrt --level O4 "
    "(float16), or accel quantize."
)
_CACHED = "leave the option out: accel stores engines and kernel times in the folder ACCEL_HOME."
_PROFILE = 'use profile="batch=1:8:32,sequence=16:128:384".'
_PAIRS = "leave the option out, and quantize the model to Q/DQ pairs: accel quantize --scheme static-int8."
_TAKEN = {
    **dict.fromkeys(("trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable"), _PRECISION),
    **{f"trt_engine_cache_{word}": _CACHED for word in ("enable", "path", "prefix")},
    **dict.fromkeys(("trt_timing_cache_enable", "trt_timing_cache_path", "trt_force_timing_cache"), _CACHED),
    **{f"trt_profile_{word}_shapes": _PROFILE for word in ("min", "opt", "max")},
    "user_compute_stream": "leave user_compute_stream out: accel orders calls on torch's current stream.",
    **dict.fromkeys(("trt_int8_calibration_table_name", "trt_int8_use_native_calibration_table"), _PAIRS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorrtOptions:
    """Options of the TensorRT backend after validation.

    Attributes:
        profile: Sizes of the axes for which the defaults are not used.
        provider: ONNX Runtime's provider options, as strings.
    """

    profile: Mapping[str, AxisSizes] = field(default_factory=dict)
    provider: Mapping[str, str] = field(default_factory=dict)


def read_options(options: Mapping[str, object], device: DeviceSpec) -> TensorrtOptions:
    """Check the names and values of options.

    Raises:
        ConfigError: An option does not exist or is set by accel, or `device_id` differs from the device.
    """
    option_names = (*PROVIDER_OPTIONS, "profile")
    check_option_names(options, option_names, _TAKEN, TENSORRT)
    index = device_index(options, device)
    texts = {name: str(value) for name, value in options.items() if name not in ("profile", "device_id")}
    return TensorrtOptions(
        profile=read_profile(str(options.get("profile", ""))),
        provider={n: {"True": "1", "False": "0"}.get(v, v) for n, v in texts.items()} | {"device_id": str(index)},
    )


_WORDS = {
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.INT8: "int8",
    ir.DataType.FLOAT8E4M3FN: "float8_e4m3fn",
}


def precisions(model: ir.Model) -> tuple[str, ...]:
    """Return the low-precision data types of a graph: those of its weights and of its Q/DQ pairs."""
    words: set[str] = set()
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
                words.add(_WORDS[value.dtype])
        for node in graph:
            if node.op_type == "DequantizeLinear" and node.inputs[0] is not None and node.inputs[0].dtype in _WORDS:
                words.add(_WORDS[node.inputs[0].dtype])
    return tuple(sorted(words))


def precision_flags(precisions: tuple[str, ...]) -> dict[str, str]:
    """Return provider options that allow TensorRT 10 to use kernels of these precisions instead of float32."""
    flags = {"float16": "trt_fp16_enable", "bfloat16": "trt_bf16_enable", "int8": "trt_int8_enable"}
    return {flags[word]: "1" for word in precisions if word in flags}
