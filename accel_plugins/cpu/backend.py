"""ONNX Runtime's CPU provider."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnxruntime as ort

from accel.artifact import Artifact
from accel.backends.interfaces import Exporter, Optimizer, Quantizer, Shapes
from accel.backends.specs import DeviceSpec, Probe, Reason
from accel.config import ExportConfig, SessionOptions
from accel.errors import ConfigError

from ..ortkit.export.exporter import OnnxExporter
from ..ortkit.quantization.presets import PRESETS
from ..ortkit.runtime.session import OrtSession, for_float8, is_float8, open_session
from .flags import adds_in_16_bits, cpu_flags

PROVIDER = "CPUExecutionProvider"

# ONNX Runtime fuses Add + LayerNormalization at load by itself, into a kernel that is five times slower on the CPU
# (12 layers: 2.6 against 0.5 ms; measured on 2 cores with AMX, onnxruntime 1.31).
SLOW_FUSIONS = ("SkipLayerNormFusion",)

# Lays out convolutions, which decoders have none of, and crashes the process on Gemma 3 in float16 (ONNX Runtime 1.31.1).
CRASHING = ("NchwcTransformer",)

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


class CpuBackend:
    """Runs ONNX graphs on the host."""

    def probe(self) -> Probe:
        """The host, with the instruction sets that matter to kernels."""
        versions = {"onnxruntime": ort.__version__}
        if PROVIDER not in ort.get_available_providers():
            reason = Reason(
                "provider",
                f"this ONNX Runtime build has no {PROVIDER}",
                'pip install "accel-transformers[onnxruntime]"',
            )
            return Probe(reasons=(reason,), versions=versions)
        device = DeviceSpec("cpu", name=platform.processor() or platform.machine(), arch="+".join(cpu_flags()))
        return Probe(devices=(device,), versions=versions)

    def exporter(self) -> Exporter:
        """The ONNX exporter."""
        return OnnxExporter("cpu")

    def optimizer(self) -> Optimizer:
        """The ONNX optimizer."""
        from ..ortkit.optimization.optimizer import OrtOptimizer

        return OrtOptimizer("cpu")

    def quantizer(self) -> Quantizer:
        """The ONNX quantizer; its presets read this CPU's flags."""
        from ..ortkit.quantization.quantizer import OrtQuantizer

        return OrtQuantizer("cpu", cpu_flags)

    def adopt(
        self, folder: Path, *, task: str, config: ExportConfig, trust_remote_code: bool = False
    ) -> Artifact | None:
        """Reads no other folders."""
        return None

    def open(
        self,
        artifact: Artifact,
        *,
        device: DeviceSpec,
        options: Mapping[str, object],
        session: SessionOptions,
        shapes: Shapes | None = None,
        trust_remote_code: bool = False,
    ) -> Mapping[str, OrtSession]:
        """Open every component; see `accel.backends.interfaces.Backend.open`."""
        if options:
            raise ConfigError(
                f"{PROVIDER} has no options of its own, not {sorted(options)}.",
                fix="pass ONNX Runtime's settings as session_options=SessionOptions(native={...}).",
            )
        computes = "int8" if artifact.manifest.quantization and not is_float8(artifact) else "float32"
        if session.compute_dtype not in (None, "float32"):
            raise ConfigError(
                f"ONNX Runtime's CPU kernels compute in float32, not in {session.compute_dtype}.",
                fix="leave compute_dtype out, or use another backend (`accel doctor` lists them).",
            )
        return {
            component.name: open_session(
                artifact.path / component.file,
                component,
                device=device,
                provider=PROVIDER,
                provider_options=options,
                options=with_exact_sums(for_float8(session, artifact), artifact),
                # ONNX Runtime casts half-precision graphs to float32 for its CPU kernels.
                compute_dtype=computes,
                disabled_optimizers=(*SLOW_FUSIONS, *(CRASHING if component.stateful else ())),
                shapes=shapes,
            )
            for component in artifact.components
        }
