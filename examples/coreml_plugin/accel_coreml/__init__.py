"""Spec of a backend for Core ML, ONNX Runtime's execution provider for Apple's Neural Engine, GPUs and CPUs.

This module imports only interface modules of `accel`.
"""

from accel.interfaces.specs import BackendSpec, Capability

SPEC = BackendSpec(
    name="coreml",
    summary="Core ML on Apple hardware (ONNX Runtime's provider)",
    extra="accel-coreml",
    impl="accel_coreml.backend:CoreMlBackend",
    requires=("onnxruntime",),
    aliases=("CoreMLExecutionProvider",),
    distributions=("onnxruntime",),
    native_options="onnxruntime.SessionOptions",
    capabilities=(
        # Higher levels than O1 add operators that only ONNX Runtime defines, and Core ML does not support these operators.
        Capability(stage="optimize", consumes="onnx", produces="onnx", schemes=("O1",)),
        Capability(
            stage="run",
            consumes="onnx",
            devices=("npu", "gpu", "cpu"),
            dtypes=("float32", "float16"),
            domains=("",),
            # https://onnxruntime.ai/docs/execution-providers/CoreML-ExecutionProvider.html
            options=(
                "EnableOnSubgraphs",
                "ModelCacheDirectory",
                "ProfileComputePlan",
                "RequireStaticInputShapes",
                "SpecializationStrategy",
            ),
            thread_safe=True,
        ),
    ),
)
