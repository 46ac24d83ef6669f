"""The names that sentence-transformers imports from `optimum.onnxruntime`, implemented by accel."""

from accel.compat.optimum.import_conflicts import refuse_if_installed

refuse_if_installed("optimum-onnx")

from accel.compat.optimum import (  # noqa: E402  # The check above must run before this import.
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
