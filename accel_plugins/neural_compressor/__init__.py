"""The backend `neural-compressor`. Intel Neural Compressor quantizes PyTorch models. ONNX Runtime and OpenVINO run the
exported models.
"""

from accel.interfaces.specs import WEIGHTS, BackendSpec, Capability, SchemeSettings

AUTO_ROUND = 'pip install "auto-round>=0.9"'
ALGORITHMS = ("rtn", "gptq", "awq", "teq", "autoround")
_WEIGHT_ONLY = ("exclude", "symmetric", "block_size", "algorithm")

SPEC = BackendSpec(
    name="neural-compressor",
    summary="Intel Neural Compressor, which quantizes PyTorch models for other backends to run",
    extra="neural-compressor",
    impl="accel_plugins.neural_compressor.backend:NeuralCompressorBackend",
    # The packed layers of Neural Compressor import `accelerate`, which its package does not declare as a dependency.
    requires=("neural_compressor", "torchao", "accelerate"),
    aliases=("inc",),
    distributions=("neural-compressor-pt", "torchao", "auto-round"),
    tested=(("neural-compressor-pt", "3.10", "3.10"),),
    capabilities=(
        Capability(
            stage="quantize",
            consumes=WEIGHTS,
            produces=WEIGHTS,
            schemes=("static-int8", "weight-int8", "weight-int4"),
            settings=(
                SchemeSettings("static-int8", ("exclude", "per_channel", "calibration")),
                SchemeSettings("weight-int8", _WEIGHT_ONLY),
                SchemeSettings("weight-int4", _WEIGHT_ONLY),
            ),
        ),
    ),
)
