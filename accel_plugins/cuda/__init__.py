"""ONNX Runtime on NVIDIA GPUs."""

from accel.specs import BackendSpec, Capability

_FLOATS = ("float32", "float16", "bfloat16")

SPEC = BackendSpec(
    name="cuda",
    summary="ONNX Runtime on NVIDIA GPUs (CUDA provider)",
    extra="cuda",
    impl="accel_plugins.cuda.backend:CudaBackend",
    priority=20,
    auto=True,
    requires=("onnxruntime",),
    aliases=("CUDAExecutionProvider",),
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
        ),
        Capability(stage="run", consumes="onnx", devices=("cuda",), dtypes=(*_FLOATS, "int8"), device_io=True),
        # ONNX Runtime's attention with a cache has no float32 kernel.
        Capability(
            stage="run",
            consumes="onnx",
            devices=("cuda",),
            dtypes=("float16", "bfloat16"),
            tasks=("text-generation",),
            device_io=True,
        ),
        Capability(
            stage="run",
            consumes="onnx",
            devices=("cuda",),
            dtypes=(),
            tasks=("text2text-generation", "automatic-speech-recognition", "image-to-text", "image-text-to-text"),
        ),
    ),
)
