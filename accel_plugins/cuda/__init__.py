"""Backend that runs ONNX graphs with ONNX Runtime on NVIDIA GPUs."""

from accel.interfaces.specs import GENERATES, BackendSpec, Capability

from ..ortkit.capabilities import FLOATS, NVIDIA, ONNX_FOLDERS, ONNX_LAYOUTS

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
    tested=(("onnxruntime-gpu", "1.30", "1.32"),),
    conflicts=(("onnxruntime", "onnxruntime-gpu"),),
    native_options="onnxruntime.SessionOptions",
    layouts=ONNX_LAYOUTS,
    folder_reader=ONNX_FOLDERS,
    recorded_options=("cuda_graphs", "packing", "padding"),
    capabilities=(
        *NVIDIA,
        Capability(
            stage="run",
            consumes="onnx",
            devices=("cuda",),
            dtypes=(*FLOATS, "int8"),
            excludes=(GENERATES,),
            device_io=True,
            thread_safe=True,
        ),
        Capability(
            stage="run",
            consumes="onnx",
            devices=("cuda",),
            dtypes=FLOATS,
            tasks=(GENERATES,),
            device_io=True,
            thread_safe=True,
        ),
    ),
)
