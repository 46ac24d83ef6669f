"""Intel Neural Compressor: quantizes PyTorch models; ONNX Runtime and OpenVINO run what is exported from them."""

from accel.interfaces.specs import WEIGHTS, BackendSpec, Capability, SchemeSettings

AUTO_ROUND = 'pip install "auto-round>=0.9"'
ALGORITHMS = ("rtn", "gptq", "awq", "teq", "autoround")
_WEIGHT_ONLY = ("exclude", "symmetric", "block_size", "algorithm", "max_drop")

SPEC = BackendSpec(
    name="neural-compressor",
    summary="Intel Neural Compressor, which quantizes PyTorch models for other backends to run",
    extra="neural-compressor",
    impl="accel_plugins.neural_compressor.backend:NeuralCompressorBackend",
    # `accelerate`: its packed layers are imported through it, without its package saying so.
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
                SchemeSettings("static-int8", ("exclude", "per_channel", "calibration", "max_drop")),
                SchemeSettings("weight-int8", _WEIGHT_ONLY),
                SchemeSettings("weight-int4", _WEIGHT_ONLY),
            ),
        ),
    ),
)
