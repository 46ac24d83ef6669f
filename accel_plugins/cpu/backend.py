"""ONNX Runtime's CPU provider."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace

from accel.artifact import Artifact, Component
from accel.config import SessionOptions
from accel.interfaces.cpu_features import adds_in_16_bits, cpu_flags
from accel.interfaces.specs import DeviceSpec

from ..ortkit.provider import ProviderBackend
from ..ortkit.quantization.presets import PRESETS
from . import SPEC

# ONNX Runtime fuses Add + LayerNormalization at load by itself, into a kernel that is five times slower on the CPU
# (12 layers: 2.6 against 0.5 ms; measured on 2 cores with AMX, onnxruntime 1.31).
SLOW_FUSIONS = ("SkipLayerNormFusion",)

# Lays out convolutions, and crashes the process on graphs in float16 that have none: Gemma 3, XLNet (ONNX Runtime 1.31.1).
CRASHING = ("NchwcTransformer",)
_CONVOLUTIONS = ("Conv", "ConvInteger", "QLinearConv")

# Unsigned weights where 16-bit sums of signed ones would saturate: slower, and right.
_EXACT_SUMS = "session.x64quantprecision"


def with_exact_sums(session: SessionOptions, artifact: Artifact) -> SessionOptions:
    """The options with which 8-bit weights of full range are multiplied exactly on a processor that adds pairs of
    products in 16 bits: an artifact made on a newer one is up to 14 % off without (256 x 64, random weights).
    Weights of presets that keep 7 bits cannot saturate and keep the faster kernel.
    """
    quantization = artifact.manifest.quantization
    preset = PRESETS.get(quantization.preset) if quantization is not None else None
    if not adds_in_16_bits(cpu_flags()) or (preset is not None and preset.reduce_range):
        return session
    return replace(session, native={_EXACT_SUMS: "1", **session.native})


def _no_convolutions(artifact: Artifact, component: Component) -> bool:
    """Of graphs in half precision; others are not looked at."""
    if artifact.dtype not in ("float16", "bfloat16"):
        return False
    from ..ortkit.graph.editing import load_graph, nodes

    return not any(True for _ in nodes(load_graph(artifact, component), *_CONVOLUTIONS))


class CpuBackend(ProviderBackend):
    """Runs ONNX graphs on the host."""

    spec = SPEC
    provider = "CPUExecutionProvider"
    install = 'pip install "accel-transformers[onnxruntime]"'
    # ONNX Runtime casts half-precision graphs to float32 for its CPU kernels.
    kernel_dtype = "float32"
    own_lengths = True

    def devices(self) -> tuple[DeviceSpec, ...]:
        """The host, with the instruction sets that matter to kernels."""
        return (DeviceSpec("cpu", name=platform.processor() or platform.machine(), arch="+".join(cpu_flags())),)

    def disabled_optimizers(self, artifact: Artifact, component: Component) -> Sequence[str]:
        """Fusions that are slower than what they replace, and one that crashes where it has nothing to do."""
        return (*SLOW_FUSIONS, *(CRASHING if component.stateful or _no_convolutions(artifact, component) else ()))

    def session_options(self, artifact: Artifact, session: SessionOptions) -> SessionOptions:
        """Exact products of 8-bit weights on processors that would saturate."""
        return with_exact_sums(super().session_options(artifact, session), artifact)

    def cpu_flags(self) -> Sequence[str]:
        """This CPU's."""
        return cpu_flags()
