"""ONNX Runtime on NVIDIA GPUs."""

from accel.backends.specs import BackendSpec, Capability, SchemeSettings

_FLOATS = ("float32", "float16", "bfloat16")
_PAIRS = ("preset", "per_channel", "symmetric", "operators", "exclude", "calibration", "percentile")

SPEC = BackendSpec(
    name="cuda",
    summary="ONNX Runtime on NVIDIA GPUs (CUDA provider)",
    extra="cuda",
    impl="accel_plugins.cuda.backend:CudaBackend",
    priority=20,
    auto=True,
    requires=("onnxruntime",),
    aliases=("CUDAExecutionProvider",),
    distributions=("onnxruntime-gpu",),
    conflicts=(("onnxruntime", "onnxruntime-gpu"),),
    native_options="onnxruntime.SessionOptions",
    recorded_options=("cuda_graphs", "packing", "padding"),
    capabilities=(
        Capability(
            stage="optimize",
            consumes="onnx",
            produces="onnx",
            devices=("cuda",),
            dtypes=_FLOATS,
            schemes=("O1", "O2", "O3", "O4"),
        ),
        # Computed in floating point here, and so slower: for the accuracy of what TensorRT computes in 8 bits.
        Capability(
            stage="quantize",
            consumes="onnx",
            produces="onnx",
            devices=("cuda",),
            dtypes=("float32", "float16"),
            schemes=("static-fp8", "static-int8"),
            settings=(SchemeSettings("static-fp8", _PAIRS), SchemeSettings("static-int8", _PAIRS)),
        ),
        Capability(
            stage="run",
            consumes="onnx",
            devices=("cuda",),
            dtypes=(*_FLOATS, "int8"),
            excludes=("text2text-generation", "automatic-speech-recognition", "image-to-text", "image-text-to-text"),
            device_io=True,
            thread_safe=True,
        ),
        # ONNX Runtime's attention with a cache has no float32 kernel.
        Capability(
            stage="run",
            consumes="onnx",
            devices=("cuda",),
            dtypes=("float16", "bfloat16"),
            tasks=("text-generation",),
            device_io=True,
            thread_safe=True,
        ),
    ),
)
