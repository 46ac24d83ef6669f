"""The backend `openvino`: runs OpenVINO IR and ONNX graphs, and quantizes with NNCF."""

from dataclasses import replace

from accel.interfaces.specs import GENERATES, BackendSpec, Capability, OptionTrial, SchemeSettings

FORMAT = "openvino_ir"
_FLOATS = ("float32", "float16", "bfloat16")
_COMMON = ("preset", "operators", "exclude")
_SETTINGS = (
    SchemeSettings(
        "static-int8",
        (*_COMMON, "per_channel", "calibration", "percentile", "smooth_quant"),
        (OptionTrial("calibration", "percentile", same_speed=True),),
    ),
    SchemeSettings("weight-int8", (*_COMMON, "symmetric")),
    SchemeSettings(
        "weight-int4",
        (*_COMMON, "symmetric", "block_size", "algorithm", "ratio", "scale_estimation"),
        (OptionTrial("block_size", 128, tasks=(GENERATES,)),),
    ),
)

# By default, OpenVINO rounds the inputs of compressed weights to 8 bits. The backend disables this, because it is less accurate.
# A KV cache in 8 bits (`kv_cache_precision`) is not tried, because a search measures no decode steps, and only decode steps read the
# cache.
_ROUNDED_ACTIVATIONS = OptionTrial("dynamic_quantization_group_size", 32, tasks=(GENERATES,))

_RUN = Capability(
    stage="run",
    consumes=FORMAT,
    devices=("cpu", "gpu", "npu", "auto"),
    dtypes=_FLOATS,
    thread_safe=True,
    preferred_multiple=16,
    fixed_shapes=True,
    trials=(_ROUNDED_ACTIVATIONS,),
)
_QUANTIZE = Capability(
    stage="quantize",
    consumes=FORMAT,
    produces=FORMAT,
    schemes=tuple(settings.scheme for settings in _SETTINGS),
    settings=_SETTINGS,
)

SPEC = BackendSpec(
    name="openvino",
    summary="OpenVINO on Intel and other x86 or ARM CPUs, Intel GPUs and NPUs",
    extra="openvino",
    impl="accel_plugins.openvino.backend:OpenVinoBackend",
    # The priority is lower than that of ONNX Runtime, so OpenVINO is chosen for an ONNX graph only if ONNX Runtime is
    # not installed.
    priority=5,
    auto=True,
    requires=("openvino",),
    aliases=("OpenVINOExecutionProvider", "ov"),
    distributions=("openvino", "nncf"),
    tested=(("openvino", "2026.3", "2026.4"), ("nncf", "3.0", "3.4")),
    layouts=("openvino_*.xml",),
    folder_reader="accel_plugins.openvino.ir_folder_reader:OpenVinoFolderReader",
    recorded_options=("performance_hint", "streams", "pinning", _ROUNDED_ACTIVATIONS.name),
    capabilities=(
        Capability(stage="export", produces=FORMAT, dtypes=_FLOATS, schemes=("weight-int8", "weight-int4")),
        _RUN,
        # ONNX decoders are excluded, because their KV cache is outside of the graph, and OpenVINO needs the KV cache
        # inside the graph.
        replace(_RUN, consumes="onnx", excludes=(GENERATES,)),
        # This capability converts ONNX graphs. Both levels do the same conversion, which does not change the accuracy.
        Capability(
            stage="optimize",
            consumes="onnx",
            produces=FORMAT,
            dtypes=_FLOATS,
            schemes=("O1", "O2"),
            excludes=(GENERATES,),
        ),
        _QUANTIZE,
        replace(_QUANTIZE, consumes="onnx", excludes=(GENERATES,)),
    ),
)
