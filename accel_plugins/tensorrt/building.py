"""Building of TensorRT engines for the local GPU from ONNX artifacts or from PyTorch models."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from accel.artifact import Artifact, Step, copy_companions, record_files, scratch, tool_versions
from accel.capture import Source, usual_sizes_in
from accel.config import ExportConfig
from accel.errors import ConfigError, ExportError
from accel.interfaces.shape_profiles import Profile, read_profile, shapes_of
from accel.interfaces.specs import DeviceSpec, Probe

from ..ortkit.export.exporter import OnnxExporter
from ..ortkit.graph.editing import MICROSOFT, load_graph
from ..ortkit.runtime.nvidia import on_gpu
from . import FORMAT
from .caches import EngineMachine, timing_cache
from .engines import EngineSession, build_plan, check_precisions
from .options import precisions
from .profiles import complete


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
    if artifact.format != "onnx":
        raise ConfigError(
            f"Engines are built from ONNX graphs, but the artifact has the format {artifact.format}.",
            fix="export the model to ONNX.",
        )
    started = time.perf_counter()
    components, sizes = [], {}
    for component in artifact.components:
        model = load_graph(artifact, component)
        ort_operators = sorted({node.op_type for graph in model.graphs() for node in graph if node.domain == MICROSOFT})
        if ort_operators:
            raise ExportError(
                f"The graph {component.file} has operators of ONNX Runtime that TensorRT does not support: {', '.join(ort_operators)}.",
                fix="use the artifact from before it was optimized, or optimize it with --backend tensorrt.",
            )
        full_profile = complete(component, profile or {}, usual_sizes_in(artifact.path, component.inputs))
        sizes[component.name] = {axis: str(size) for axis, size in full_profile.items()}
        # TensorRT builds for the current GPU, so make the requested GPU current.
        with on_gpu(device.index):
            plan = build_plan(
                artifact.path / component.file,
                {spec.name: shapes_of(spec, full_profile) for spec in component.inputs},
                times=timing_cache(machine) / "times.bin",
            )
        engine = EngineSession(plan, device)
        try:
            check_precisions(engine.information(), precisions(model))
        finally:
            engine.close()
        file = f"{component.name}.plan"
        (out / file).write_bytes(plan)
        components.append(replace(component, file=file, files=record_files(out, [file]), domains=None))
    copy_companions(artifact.path, out)
    step = Step(
        stage="export",
        backend="tensorrt",
        config={"profile": sizes},
        versions=tool_versions("tensorrt"),
        seconds=round(time.perf_counter() - started, 2),
    )
    return artifact.after(step, out, components=components, format=FORMAT, target=machine.target())


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
            graph = OnnxExporter("tensorrt").export(source, task=task, config=config, out=folder)
            return build(graph, out, device=device, machine=EngineMachine.of(device, probe.versions), profile=profile)
