"""ONNX Runtime's CUDA provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from accel.artifact import Artifact
from accel.interfaces.protocols import Exporter, OpenRequest, Optimizer, Quantizer, Session
from accel.interfaces.specs import Probe, Reason

from ..ortkit.runtime.nvidia import judge, survey

if TYPE_CHECKING:
    from .shared_runtimes import SharedRuntimes


class CudaBackend:
    """Runs ONNX graphs on NVIDIA GPUs.

    What opens and rewrites graphs is imported where it is used: every model that is loaded asks whether there is a GPU, on machines
    without one, too.
    """

    def __init__(self) -> None:
        self._runtimes: SharedRuntimes | None = None

    def probe(self) -> Probe:
        """The GPUs, or every reason why they cannot be used. Makes no CUDA context."""
        try:
            return judge(survey())
        # Foreign libraries in unknown states: whatever they raise is a reason, not a crash.
        except Exception as error:  # noqa: BLE001
            return Probe(
                reasons=(
                    Reason(
                        "probe-failed",
                        f"looking for GPUs failed: {type(error).__name__}: {error}",
                        "check that `nvidia-smi` and `python -c 'import onnxruntime, torch'` work",
                    ),
                )
            )

    def exporter(self) -> Exporter | None:
        """None: the CPU backend exports ONNX."""
        return None

    def optimizer(self) -> Optimizer:
        """Fusions for CUDA kernels, and float16."""
        from ..ortkit.optimization.fusions import CUDA
        from ..ortkit.optimization.optimizer import OrtOptimizer

        return OrtOptimizer("cuda", CUDA)

    def quantizer(self) -> Quantizer:
        """Explicit Q/DQ pairs."""
        from ..ortkit.quantization.gpu_quantizer import GpuQuantizer

        return GpuQuantizer("cuda")

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Open every component; see `accel.interfaces.protocols.Backend.open`.

        `shapes` changes nothing: each shape that comes again gets a CUDA graph of its own, over the same weights.
        """
        if self._runtimes is None:
            from .shared_runtimes import SharedRuntimes

            self._runtimes = SharedRuntimes()
        return self._runtimes.open(artifact, request)
