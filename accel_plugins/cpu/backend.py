"""ONNX Runtime's CPU provider."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import onnxruntime as ort

from accel.artifact import Artifact
from accel.config import SessionOptions
from accel.errors import ConfigError
from accel.interfaces import Exporter, Optimizer, Quantizer, Shapes
from accel.specs import DeviceSpec, Probe, Reason

from ..ort.exporter import OnnxExporter
from ..ort.session import OrtSession, for_float8, is_float8, open_session
from .flags import cpu_flags

PROVIDER = "CPUExecutionProvider"

# ONNX Runtime fuses Add + LayerNormalization at load by itself, into a kernel that is five times slower on the CPU
# (12 layers: 2.6 against 0.5 ms; measured on 2 cores with AMX, onnxruntime 1.31).
SLOW_FUSIONS = ("SkipLayerNormFusion",)

# Lays out convolutions, which decoders have none of, and crashes the process on Gemma 3 in float16 (ONNX Runtime 1.31.1).
CRASHING = ("NchwcTransformer",)


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
        from ..ort.optimizer import OrtOptimizer

        return OrtOptimizer("cpu")

    def quantizer(self) -> Quantizer:
        """The ONNX quantizer; its presets read this CPU's flags."""
        from ..ort.quantizer import OrtQuantizer

        return OrtQuantizer("cpu", cpu_flags)

    def open(
        self,
        artifact: Artifact,
        *,
        device: DeviceSpec,
        options: Mapping[str, object],
        session: SessionOptions,
        shapes: Shapes | None = None,
    ) -> Mapping[str, OrtSession]:
        """Open every component; see `accel.interfaces.Backend.open`."""
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
                options=for_float8(session, artifact),
                # ONNX Runtime casts half-precision graphs to float32 for its CPU kernels.
                compute_dtype=computes,
                disabled_optimizers=(*SLOW_FUSIONS, *(CRASHING if component.stateful else ())),
                shapes=shapes,
            )
            for component in artifact.components
        }
