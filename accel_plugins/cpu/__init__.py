"""ONNX Runtime on the CPU."""

from accel.specs import BackendSpec, Capability

# No bfloat16: ONNX Runtime has no CPU kernels for it.
_DTYPES = ("float32", "float16", "int8")

SPEC = BackendSpec(
    name="cpu",
    summary="ONNX Runtime on the CPU",
    extra="onnxruntime",
    impl="accel_plugins.cpu.backend:CpuBackend",
    priority=10,
    auto=True,
    requires=("onnxruntime",),
    aliases=("CPUExecutionProvider", "onnxruntime", "ort"),
    capabilities=(
        Capability(stage="export", produces="onnx", dtypes=("float32", "float16")),
        Capability(
            stage="optimize",
            consumes="onnx",
            produces="onnx",
            dtypes=("float32", "float16"),
            schemes=("O1", "O2", "O3", "O4"),
        ),
        Capability(
            stage="quantize",
            consumes="onnx",
            produces="onnx",
            schemes=("dynamic-int8", "static-int8", "weight-int8", "weight-int4"),
        ),
        Capability(stage="run", consumes="onnx", dtypes=_DTYPES),
    ),
)
