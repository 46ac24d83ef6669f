"""The names that sentence-transformers imports from `optimum.onnxruntime.configuration`, implemented by accel."""

from accel.compat.optimum import (
    AutoOptimizationConfig,
    AutoQuantizationConfig,
    OptimizationConfig,
    QuantizationConfig,
)

__all__ = ["AutoOptimizationConfig", "AutoQuantizationConfig", "OptimizationConfig", "QuantizationConfig"]
