"""ONNX Runtime's CPU provider."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from accel.artifact import Component
from accel.backends.specs import DeviceSpec

from ..ortkit.provider import ProviderBackend
from . import SPEC
from .flags import cpu_flags

# ONNX Runtime fuses Add + LayerNormalization at load by itself, into a kernel that is five times slower on the CPU
# (12 layers: 2.6 against 0.5 ms; measured on 2 cores with AMX, onnxruntime 1.31).
SLOW_FUSIONS = ("SkipLayerNormFusion",)

# Lays out convolutions, which decoders have none of, and crashes the process on Gemma 3 in float16 (ONNX Runtime 1.31.1).
CRASHING = ("NchwcTransformer",)


class CpuBackend(ProviderBackend):
    """Runs ONNX graphs on the host."""

    spec = SPEC
    provider = "CPUExecutionProvider"
    install = 'pip install "accel-transformers[onnxruntime]"'
    # ONNX Runtime casts half-precision graphs to float32 for its CPU kernels.
    kernel_dtype = "float32"

    def devices(self) -> tuple[DeviceSpec, ...]:
        """The host, with the instruction sets that matter to kernels."""
        return (DeviceSpec("cpu", name=platform.processor() or platform.machine(), arch="+".join(cpu_flags())),)

    def disabled_optimizers(self, component: Component) -> Sequence[str]:
        """Fusions that are slower than what they replace, and for decoders one that crashes."""
        return (*SLOW_FUSIONS, *(CRASHING if component.stateful else ()))

    def cpu_flags(self) -> Sequence[str]:
        """This CPU's."""
        return cpu_flags()
