"""Core ML through ONNX Runtime's provider: Apple's Neural Engine, GPUs and CPUs. Imports nothing but the interface modules."""

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
        # The first level has no fusion into ONNX Runtime's own operators, which Core ML does not know.
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
