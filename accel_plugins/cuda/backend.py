"""Implementation of the `cuda` backend: ONNX Runtime's CUDA execution provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from accel.artifact import Artifact
from accel.interfaces.protocols import Exporter, OpenRequest, Optimizer, Quantizer, Session
from accel.interfaces.specs import Probe

from ..ortkit.runtime.nvidia import judge, survey

if TYPE_CHECKING:
    from .shared_runtimes import SharedRuntimes


class CudaBackend:
    """Backend that runs ONNX graphs on NVIDIA GPUs.

    Modules that open and rewrite graphs are imported when they are first used, because loading any model probes this
    backend, even on machines without a GPU.
    """

    def __init__(self) -> None:
        self._runtimes: SharedRuntimes | None = None

    def probe(self) -> Probe:
        """Return the GPUs, or all reasons why they cannot be used. Creates no CUDA context."""
        return judge(survey())

    def exporter(self) -> Exporter | None:
        """Return `None`, because the `cpu` backend exports ONNX."""
        return None

    def optimizer(self) -> Optimizer:
        """Return the optimizer with fusions for CUDA kernels and half precision."""
        from ..ortkit.optimization.fusions import CUDA
        from ..ortkit.optimization.optimizer import OrtOptimizer

        return OrtOptimizer("cuda", CUDA)

    def quantizer(self) -> Quantizer:
        """Return the quantizer that writes explicit Q/DQ pairs."""
        from ..ortkit.quantization.gpu_quantizer import GpuQuantizer

        return GpuQuantizer("cuda")

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Open a session for every component; see `accel.interfaces.protocols.Backend.open`.

        `shapes` has no effect: each input shape that is used again gets its own CUDA graph, with the same weights.
        """
        if self._runtimes is None:
            from .shared_runtimes import SharedRuntimes

            self._runtimes = SharedRuntimes()
        return self._runtimes.open(artifact, request)
