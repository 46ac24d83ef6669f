"""Building of TensorRT engines for the local GPU from ONNX artifacts or from PyTorch models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from accel.artifact import Artifact, scratch
from accel.capture import Source
from accel.config import ExportConfig
from accel.errors import ExportError
from accel.interfaces.shape_profiles import Profile, read_profile
from accel.interfaces.specs import DeviceSpec, Probe

from ..ortkit.engines.artifacts import build_engines
from ..ortkit.engines.libraries import TENSORRT
from ..ortkit.engines.session import EngineSession, check_precisions
from ..ortkit.export.exporter import OnnxExporter
from ..ortkit.runtime.nvidia import on_gpu
from . import FORMAT
from .caches import EngineMachine, timing_cache
from .options import precisions


def build(
    artifact: Artifact, out: Path, *, device: DeviceSpec, machine: EngineMachine, profile: Profile | None = None
) -> Artifact:
    """Build an engine for every graph of an ONNX artifact into the existing folder `out`. Takes minutes.

    The engine has the precision of the graph. An error is raised if the engine computes nothing in this precision.

    Args:
        artifact: An artifact in the format `onnx`, without operators of ONNX Runtime.
        out: The output folder.
        device: The GPU.
        machine: The GPU and its software, recorded in the artifact, because the engine runs only with the same GPU and software.
        profile: Sizes of axes; `complete` adds the missing axes.

    Raises:
        ConfigError: The artifact has another format, or the profile does not fit the graph.
        ExportError: The graph has operators that TensorRT does not support.
        SessionError: TensorRT cannot build an engine for the graph.
    """
    # TensorRT builds for the current GPU, so make the requested GPU current.
    with on_gpu(device.index):
        return build_engines(
            artifact,
            out,
            library=TENSORRT,
            format=FORMAT,
            target=machine.target(),
            profile=profile,
            times=timing_cache(machine) / "times.bin",
            inspect=lambda plan, model: _inspect(plan, model, device),
        )


def _inspect(plan: bytes, model: ir.Model, device: DeviceSpec) -> None:
    """Load an engine, and check that it has tensors in every low-precision data type of its graph."""
    engine = EngineSession(plan, device)
    try:
        check_precisions(engine.information(), precisions(model))
    finally:
        engine.close()


class EngineExporter:
    """Exporter that captures a model as ONNX in a temporary folder and builds engines from it.

    Args:
        probe: The backend's `probe` method.
    """

    def __init__(self, probe: Callable[[], Probe]) -> None:
        self._probe = probe

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Export the model as engines; see `accel.interfaces.protocols.Exporter`.

        Takes minutes and needs a GPU of the kind that runs the engine. The option `profile` sets the sizes of axes, for
        example `batch=1:8:32,sequence=16:128:384`.

        Raises:
            ExportError: TensorRT cannot be used on this machine; the message has all reasons.
        """
        profile = read_profile(config.options.get("profile", ""))
        probe = self._probe()
        if not probe.available:
            why = "; ".join(str(reason) for reason in probe.reasons)
            raise ExportError(
                f"An engine must be built on the GPU that runs it, but TensorRT cannot be used on this machine: {why}.",
                fix="export the model to ONNX on this machine, and build the engine on the machine with the GPU.",
            )
        device = probe.devices[0]
        with scratch() as folder:
            graph = OnnxExporter("tensorrt", attention=None).export(source, task=task, config=config, out=folder)
            return build(graph, out, device=device, machine=EngineMachine.of(device, probe.versions), profile=profile)
