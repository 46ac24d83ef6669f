"""Spec of a Core ML backend: ONNX Runtime's provider for Apple's Neural Engine, GPUs and CPUs. Imports only interface modules."""

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
        # Level O1 adds none of ONNX Runtime's own operators, which Core ML does not support.
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
