"""Spec of a backend for OpenVINO as an execution provider of ONNX Runtime (Intel's package `onnxruntime-ep-openvino`).

This module imports only interface modules of `accel`.
"""

from accel.interfaces.specs import BackendSpec, Capability

SPEC = BackendSpec(
    name="openvino-ep",
    summary="OpenVINO as an execution provider of ONNX Runtime",
    extra="accel-openvino-ep",
    impl="accel_openvino_ep.backend:OpenVinoEpBackend",
    requires=("onnxruntime",),
    aliases=("OpenVINOExecutionProvider",),
    distributions=("onnxruntime", "onnxruntime-ep-openvino"),
    auto=False,
    capabilities=(
        Capability(stage="optimize", consumes="onnx", produces="onnx", schemes=("O1",)),
        Capability(
            stage="run",
            consumes="onnx",
            devices=("cpu", "gpu", "npu"),
            dtypes=("float32", "float16"),
            domains=("",),
            # https://onnxruntime.ai/docs/execution-providers/OpenVINO-ExecutionProvider.html
            options=("cache_dir", "load_config"),
            thread_safe=True,
        ),
    ),
)
