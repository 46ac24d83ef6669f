"""Backend for TensorRT: ONNX graphs with ONNX Runtime's TensorRT provider, and engines that are built ahead of time."""

from accel.interfaces.specs import BackendSpec, Capability

from ..ortkit.capabilities import FLOATS, NVIDIA, ONNX_FOLDERS, ONNX_LAYOUTS

FORMAT = "tensorrt"
# Operator domains that TensorRT supports. Operators of ONNX Runtime would run on the CUDA provider and divide the graph
# into many small engines.
_DOMAINS = ("", "trt.plugins")

SPEC = BackendSpec(
    name="tensorrt",
    summary="TensorRT on NVIDIA GPUs (ONNX Runtime's provider, or engines built ahead of time)",
    extra="tensorrt",
    impl="accel_plugins.tensorrt.backend:TensorrtBackend",
    priority=15,
    # Not selected automatically: TensorRT selects kernels by measured time, so results differ from build to build.
    auto=False,
    requires=("onnxruntime",),
    aliases=("TensorrtExecutionProvider", "trt"),
    distributions=("onnxruntime-gpu", "tensorrt"),
    tested=(("onnxruntime-gpu", "1.30", "1.32"), ("tensorrt", "10.0", "10.16")),
    layouts=ONNX_LAYOUTS,
    folder_reader=ONNX_FOLDERS,
    capabilities=(
        Capability(stage="export", produces=FORMAT, devices=("cuda",), dtypes=FLOATS, options=("profile",)),
        Capability(stage="run", consumes=FORMAT, devices=("cuda",), dtypes=FLOATS, device_io=True),
        Capability(
            stage="run",
            consumes="onnx",
            devices=("cuda",),
            dtypes=(*FLOATS, "int8"),
            domains=_DOMAINS,
            device_io=True,
        ),
        *NVIDIA,
    ),
)
