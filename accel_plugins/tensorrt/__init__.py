"""TensorRT: ONNX graphs through ONNX Runtime's provider, and engines built ahead of time."""

from accel.backends.specs import BackendSpec, Capability, SchemeSettings

FORMAT = "tensorrt"
_FLOATS = ("float32", "float16", "bfloat16")
# ONNX's operators, and those of TensorRT's own plugins. ONNX Runtime's would run on CUDA, piece by piece between engines.
_DOMAINS = ("", "trt.plugins")
_PAIRS = ("preset", "per_channel", "symmetric", "operators", "exclude", "calibration", "percentile")

SPEC = BackendSpec(
    name="tensorrt",
    summary="TensorRT on NVIDIA GPUs (ONNX Runtime's provider, or engines built ahead of time)",
    extra="tensorrt",
    impl="accel_plugins.tensorrt.backend:TensorrtBackend",
    priority=15,
    # It chooses kernels by their measured time, and so changes numerics from build to build.
    auto=False,
    requires=("onnxruntime",),
    aliases=("TensorrtExecutionProvider", "trt"),
    distributions=("onnxruntime-gpu", "tensorrt"),
    capabilities=(
        Capability(stage="export", produces=FORMAT, devices=("cuda",), dtypes=_FLOATS, options=("profile",)),
        Capability(stage="run", consumes=FORMAT, devices=("cuda",), dtypes=_FLOATS, device_io=True),
        Capability(
            stage="run",
            consumes="onnx",
            devices=("cuda",),
            dtypes=(*_FLOATS, "int8"),
            domains=_DOMAINS,
            device_io=True,
        ),
        Capability(
            stage="optimize",
            consumes="onnx",
            produces="onnx",
            devices=("cuda",),
            dtypes=_FLOATS,
            schemes=("O1", "O2", "O3", "O4"),
        ),
        Capability(
            stage="quantize",
            consumes="onnx",
            produces="onnx",
            devices=("cuda",),
            dtypes=("float32", "float16"),
            schemes=("static-fp8", "static-int8"),
            settings=(SchemeSettings("static-fp8", _PAIRS), SchemeSettings("static-int8", _PAIRS)),
        ),
    ),
)
