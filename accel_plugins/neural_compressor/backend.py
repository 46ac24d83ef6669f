"""The backend `neural-compressor`, which quantizes models but cannot run them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata, util

from accel.artifact import Artifact
from accel.errors import SessionError
from accel.interfaces.protocols import Exporter, OpenRequest, Optimizer, Quantizer, Session
from accel.interfaces.specs import DeviceSpec, Probe, Reason

from . import AUTO_ROUND

_DISTRIBUTION = "neural-compressor-pt"
# Algorithms that are never available in this backend (Neural Compressor 3.10, torch 2.13).
_NEVER = (
    Reason(
        "hqq",
        "the algorithm 'hqq' is not available: it groups weights across output channels, but ONNX Runtime and OpenVINO need groups "
        "along the inputs",
        "use algorithm='hqq' of the backend 'cpu'",
    ),
    Reason(
        "smooth_quant",
        "SmoothQuant is not available: it needs the Intel Extension for PyTorch, which has no release for this PyTorch version",
        "use smooth_quant=... of the backend 'cpu' or 'openvino'",
    ),
)


class NeuralCompressorBackend:
    """Quantizes PyTorch models with Intel Neural Compressor."""

    def probe(self) -> Probe:
        """Return the CPU as the only device, and the reasons why some algorithms are not available."""
        reasons = list(_NEVER)
        if util.find_spec("auto_round") is None:
            reasons.insert(0, Reason("autoround", "the algorithm 'autoround' needs the package auto-round", AUTO_ROUND))
        device = DeviceSpec("cpu", name=platform.processor() or platform.machine())
        return Probe(
            devices=(device,), reasons=tuple(reasons), versions={_DISTRIBUTION: metadata.version(_DISTRIBUTION)}
        )

    def exporter(self) -> Exporter | None:
        """Return `None`: the backend `pytorch` writes models."""
        return None

    def optimizer(self) -> Optimizer | None:
        """Return `None`: this backend has no optimizer."""
        return None

    def quantizer(self) -> Quantizer:
        """Return the quantizer, which takes scales and zero points from Neural Compressor."""
        from .quantizer import CompressorQuantizer

        return CompressorQuantizer()

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Raise, because this backend does not run models.

        Raises:
            SessionError: Always.
        """
        raise SessionError(
            "The backend 'neural-compressor' only quantizes models, and cannot run them.",
            fix="export the artifact (`accel export`), or open it with backend='pytorch'.",
        )
