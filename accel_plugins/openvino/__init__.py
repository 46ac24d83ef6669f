"""OpenVINO: its graphs and ONNX graphs on Intel's runtime, quantization with NNCF."""

from accel.specs import BackendSpec, Capability

FORMAT = "openvino_ir"
_FLOATS = ("float32", "float16", "bfloat16")
_DEVICES = ("cpu", "gpu", "npu", "auto")
_SCHEMES = ("static-int8", "weight-int8", "weight-int4")

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
    layouts=("openvino_model*.xml",),
    capabilities=(
        Capability(stage="export", produces=FORMAT, dtypes=_FLOATS),
        Capability(stage="run", consumes=FORMAT, devices=_DEVICES, dtypes=_FLOATS),
        Capability(stage="run", consumes="onnx", devices=_DEVICES, dtypes=_FLOATS),
        # ONNX that exists already is converted; both levels do the same, exactly.
        Capability(stage="optimize", consumes="onnx", produces=FORMAT, dtypes=_FLOATS, schemes=("O1", "O2")),
        Capability(stage="quantize", consumes=FORMAT, produces=FORMAT, schemes=_SCHEMES),
        Capability(stage="quantize", consumes="onnx", produces=FORMAT, schemes=_SCHEMES),
    ),
)
