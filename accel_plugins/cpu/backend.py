"""Implementation of the `cpu` backend: ONNX Runtime's CPU execution provider."""

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

# When ONNX Runtime loads a graph, it fuses Add + LayerNormalization into a kernel that is five times slower on the CPU
# (12 layers: 2.6 instead of 0.5 ms; measured on 2 cores with AMX, onnxruntime 1.31).
SLOW_FUSIONS = ("SkipLayerNormFusion",)

# This optimizer changes the memory layout of convolutions. It crashes the process on float16 graphs without
# convolutions: Gemma 3, XLNet (ONNX Runtime 1.31.1).
CRASHING = ("NchwcTransformer",)
_CONVOLUTIONS = ("Conv", "ConvInteger", "QLinearConv")

# ONNX Runtime converts weights to unsigned integers where 16-bit sums of signed weights would saturate. This is slower,
# but exact.
_EXACT_SUMS = "session.x64quantprecision"


def with_exact_sums(session: SessionOptions, artifact: Artifact) -> SessionOptions:
    """Return session options with which products of 8-bit weights are exact on every processor.

    Some processors add pairs of products in 16 bits, which can saturate. On such a processor, an artifact that was
    quantized for a newer processor has errors of up to 14 % without the option (256 x 64, random weights). Presets that
    reduce weights to 7 bits cannot saturate, so they keep the faster kernel.
    """
    quantization = artifact.manifest.quantization
    preset = PRESETS.get(quantization.preset) if quantization is not None else None
    if not adds_in_16_bits(cpu_flags()) or (preset is not None and preset.reduce_range):
        return session
    return replace(session, native={_EXACT_SUMS: "1", **session.native})


def _no_convolutions(artifact: Artifact, component: Component) -> bool:
    """Return whether a half-precision graph has no convolutions; return `False` for graphs of other data types."""
    if artifact.dtype not in ("float16", "bfloat16"):
        return False
    from ..ortkit.graph.editing import load_graph, nodes

    return not any(True for _ in nodes(load_graph(artifact, component), *_CONVOLUTIONS))


class CpuBackend(ProviderBackend):
    """Backend that runs ONNX graphs on the CPU of this machine."""

    spec = SPEC
    provider = "CPUExecutionProvider"
    install = 'pip install "accel-transformers[onnxruntime]"'
    # ONNX Runtime casts half-precision graphs to float32 for its CPU kernels.
    kernel_dtype = "float32"
    own_lengths = True

    def devices(self) -> tuple[DeviceSpec, ...]:
        """Return the CPU of this machine, with the instruction sets that kernels depend on."""
        return (DeviceSpec("cpu", name=platform.processor() or platform.machine(), arch="+".join(cpu_flags())),)

    def disabled_optimizers(self, artifact: Artifact, component: Component) -> Sequence[str]:
        """Return the optimizers to disable: slow fusions, and the optimizer of convolution layouts for graphs that crash it."""
        return (*SLOW_FUSIONS, *(CRASHING if component.stateful or _no_convolutions(artifact, component) else ()))

    def session_options(self, artifact: Artifact, session: SessionOptions) -> SessionOptions:
        """Return session options with which products of 8-bit weights are exact, on processors on which they would
        saturate.
        """
        return with_exact_sums(super().session_options(artifact, session), artifact)

    def rewritten_graph(self, artifact: Artifact, component: Component, session: SessionOptions) -> bytes | None:
        """Return the graph with separate zero points if products of 8-bit weights must be exact, else `None`."""
        if session.native.get(_EXACT_SUMS) != "1":
            return None
        from ..ortkit.quantization.zero_points import with_separate_zero_points

        return with_separate_zero_points(artifact.path / component.file)

    def cpu_flags(self) -> Sequence[str]:
        """Return the instruction sets of this CPU."""
        return cpu_flags()
