"""OpenVINO: its graphs and ONNX graphs on Intel's runtime, quantization with NNCF."""

from accel.interfaces.specs import (
    GENERATES,
    BackendSpec,
    Capability,
    OptionTrial,
    SchemeSettings,
)

FORMAT = "openvino_ir"
_FLOATS = ("float32", "float16", "bfloat16")
_DEVICES = ("cpu", "gpu", "npu", "auto")
_SCHEMES = ("static-int8", "weight-int8", "weight-int4")
_COMMON = ("preset", "operators", "exclude")
_SETTINGS = (
    SchemeSettings(
        "static-int8",
        (*_COMMON, "per_channel", "calibration", "percentile", "smooth_quant", "max_drop"),
        (OptionTrial("calibration", "percentile", same_speed=True),),
    ),
    SchemeSettings("weight-int8", (*_COMMON, "symmetric")),
    SchemeSettings(
        "weight-int4",
        (*_COMMON, "symmetric", "block_size", "algorithm", "ratio", "scale_estimation"),
        (OptionTrial("block_size", 128, tasks=(GENERATES,)),),
    ),
)

SPEC = BackendSpec(
    name="openvino",
    summary="OpenVINO on Intel and other x86 or ARM CPUs, Intel GPUs and NPUs",
    extra="openvino",
    impl="accel_plugins.openvino.backend:OpenVinoBackend",
    # Below ONNX Runtime: an ONNX graph comes here by itself only where that is not installed.
    priority=5,
    auto=True,
    requires=("openvino",),
    aliases=("OpenVINOExecutionProvider", "ov"),
    distributions=("openvino", "nncf"),
    tested=(("openvino", "2026.3", "2026.4"), ("nncf", "3.0", "3.4")),
    layouts=("openvino_*.xml",),
    folder_reader="accel_plugins.openvino.layouts:OpenVinoFolderReader",
    recorded_options=("performance_hint", "streams", "pinning"),
    capabilities=(
        Capability(stage="export", produces=FORMAT, dtypes=_FLOATS),
        Capability(
            stage="run",
            consumes=FORMAT,
            devices=_DEVICES,
            dtypes=_FLOATS,
            thread_safe=True,
            preferred_multiple=16,
            fixed_shapes=True,
        ),
        # An ONNX decoder keeps its cache outside of the graph, which OpenVINO has inside.
        Capability(
            stage="run",
            consumes="onnx",
            devices=_DEVICES,
            dtypes=_FLOATS,
            excludes=(GENERATES,),
            thread_safe=True,
            preferred_multiple=16,
            fixed_shapes=True,
        ),
        # ONNX that exists already is converted; both levels do the same, exactly.
        Capability(
            stage="optimize",
            consumes="onnx",
            produces=FORMAT,
            dtypes=_FLOATS,
            schemes=("O1", "O2"),
            excludes=(GENERATES,),
        ),
        Capability(stage="quantize", consumes=FORMAT, produces=FORMAT, schemes=_SCHEMES, settings=_SETTINGS),
        Capability(
            stage="quantize",
            consumes="onnx",
            produces=FORMAT,
            schemes=_SCHEMES,
            settings=_SETTINGS,
            excludes=(GENERATES,),
        ),
    ),
)
