"""The names that sentence-transformers imports from `optimum.onnxruntime`, implemented by accel."""

from accel.compat.optimum.standing import stand_in_for

stand_in_for("optimum-onnx")

from accel.compat.optimum import (  # noqa: E402  # behind the refusal
    ONNX_WEIGHTS_NAME,
    ORTModel,
    ORTModelForCausalLM,
    ORTModelForFeatureExtraction,
    ORTModelForMaskedLM,
    ORTModelForSequenceClassification,
    ORTOptimizer,
    ORTQuantizer,
)

__all__ = [
    "ONNX_WEIGHTS_NAME",
    "ORTModel",
    "ORTModelForCausalLM",
    "ORTModelForFeatureExtraction",
    "ORTModelForMaskedLM",
    "ORTModelForSequenceClassification",
    "ORTOptimizer",
    "ORTQuantizer",
]
