"""Options of the TensorRT backend: ONNX Runtime's own for its provider, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from accel.interfaces.shape_profiles import Sizes, read_profile
from accel.interfaces.specs import DeviceSpec

from ..ortkit.runtime.nvidia import TENSORRT, check_option_names, device_index

# The options of ONNX Runtime 1.31's provider that are the user's to set:
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
    "precision comes from the graph: accel optimize --backend tensorrt --level O4 (float16), or accel quantize."
)
_CACHED = "engines and kernel times are kept under ACCEL_HOME."
_TAKEN = {
    **{f"trt_{word}_enable": _PRECISION for word in ("fp16", "bf16", "int8")},
    **{f"trt_{word}": _CACHED for word in ("engine_cache_enable", "engine_cache_path", "engine_cache_prefix")},
    **{f"trt_{word}": _CACHED for word in ("timing_cache_enable", "timing_cache_path", "force_timing_cache")},
    **{
        f"trt_profile_{word}_shapes": 'use profile="batch=1:8:32,sequence=16:128:384".'
        for word in ("min", "opt", "max")
    },
    "user_compute_stream": "leave it out: calls are ordered on torch's current stream.",
    "trt_int8_calibration_table_name": "quantize to Q/DQ pairs: accel quantize --scheme static-int8.",
    "trt_int8_use_native_calibration_table": "quantize to Q/DQ pairs: accel quantize --scheme static-int8.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorrtOptions:
    """Checked options.

    Attributes:
        profile: Sizes of axes that are not left to the defaults.
        provider: ONNX Runtime's options, as strings.
    """

    profile: Mapping[str, Sizes] = field(default_factory=dict)
    provider: Mapping[str, str] = field(default_factory=dict)


def read_options(options: Mapping[str, object], device: DeviceSpec) -> TensorrtOptions:
    """Check names and values.

    Raises:
        ConfigError: An option that does not exist or is ours to set, or a `device_id` other than the device's.
    """
    known = (*PROVIDER_OPTIONS, "profile")
    check_option_names(options, known, _TAKEN, TENSORRT)
    index = device_index(options, device)
    own = {name: str(value) for name, value in options.items() if name not in ("profile", "device_id")}
    return TensorrtOptions(
        profile=read_profile(str(options.get("profile", ""))),
        provider={n: {"True": "1", "False": "0"}.get(v, v) for n, v in own.items()} | {"device_id": str(index)},
    )


_WORDS = {
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.INT8: "int8",
    ir.DataType.FLOAT8E4M3FN: "float8_e4m3fn",
}


def precisions(model: ir.Model) -> tuple[str, ...]:
    """The low precisions that a graph asks for: types of its weights, and of its Q/DQ pairs."""
    found: set[str] = set()
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
                found.add(_WORDS[value.dtype])
        for node in graph:
            if node.op_type == "DequantizeLinear" and node.inputs[0] is not None and node.inputs[0].dtype in _WORDS:
                found.add(_WORDS[node.inputs[0].dtype])
    return tuple(sorted(found))


def precision_flags(found: tuple[str, ...]) -> dict[str, str]:
    """What lets TensorRT 10 take kernels of these precisions; without a flag it would compute them in float32."""
    flags = {"float16": "trt_fp16_enable", "bfloat16": "trt_bf16_enable", "int8": "trt_int8_enable"}
    return {flags[word]: "1" for word in found if word in flags}
