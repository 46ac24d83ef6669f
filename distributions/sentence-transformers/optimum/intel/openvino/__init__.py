"""The names that sentence-transformers imports from `optimum.intel.openvino`, implemented by accel."""

from accel.compat.optimum import (
    OV_XML_FILE_NAME,
    OVConfig,
    OVModelForCausalLM,
    OVModelForFeatureExtraction,
    OVModelForMaskedLM,
    OVModelForSequenceClassification,
    OVQuantizationConfig,
    OVQuantizer,
)

__all__ = [
    "OV_XML_FILE_NAME",
    "OVConfig",
    "OVModelForCausalLM",
    "OVModelForFeatureExtraction",
    "OVModelForMaskedLM",
    "OVModelForSequenceClassification",
    "OVQuantizationConfig",
    "OVQuantizer",
]
