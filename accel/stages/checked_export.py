"""Export a resolved model: load it, convert it, and compare the new graph with PyTorch before the output folder is created."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import capture, progress
from ..artifact.atomic_folder_writing import copy_companions, scratch, staging
from ..artifact.hub import HubOptions
from ..artifact.manifest import PADDING_DIFFERENCE, Artifact
from ..artifact.resolved_model import ResolvedModel
from ..artifact.sentence_settings import transformer_folder
from ..backends import registry
from ..backends.plan import RunPreferences, make_plan
from ..backends.sessions import OpenSessions, open_plan
from ..backends.stage_backend_selection import StagePlan
from ..config import ExportConfig, check_names
from ..errors import ConfigError, ExportError, SessionError, TaskError, ValidationError
from ..interfaces.protocols import CompilingExporter, Exporter
from ..interfaces.specs import DeviceSpec
from ..interfaces.task_registry import is_adapter, task_spec
from .compiled_export import compile_artifact, compiles
from .graph_comparison import compare_with_model
from .probe_recording import probes_for, record_probes
from .sentence_comparison import compare_with_sentence_transformers

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@capture.one_thread_at_a_time()
def export_resolved(
    resolved: ResolvedModel,
    out: Path,
    *,
    plan: StagePlan,
    config: ExportConfig,
    sample: Mapping[str, torch.Tensor] | None = None,
    axes: Mapping[str, Mapping[int, str]] | None = None,
    processor: Any = None,
) -> Artifact:
    """Export a resolved model, which is already on this machine. The arguments are those of `export`.

    If the format is compiled from ONNX graphs, the ONNX graphs are compared with PyTorch on a CPU before they are compiled.
    """
    check_export(resolved, plan, config)
    inputs: dict[str, Any] = {"sample": sample, "axes": axes, "processor": processor}
    if not compiles(plan):
        return _exported(resolved, out, plan=plan, config=config, **inputs)
    with scratch() as folder:
        graphs = _exported(resolved, folder / "onnx", plan=plan, config=config, **inputs)
        return compile_artifact(graphs, out, plan=plan, config=config)


def _exported(
    resolved: ResolvedModel,
    out: Path,
    *,
    plan: StagePlan,
    config: ExportConfig,
    sample: Mapping[str, torch.Tensor] | None,
    axes: Mapping[str, Mapping[int, str]] | None,
    processor: Any,
) -> Artifact:
    """Write what the exporter writes, and compare it with PyTorch."""
    started = time.perf_counter()
    exporter: Exporter = plan.worker()
    # A compiling exporter also works on machines that cannot run its backend.
    backend = None if isinstance(exporter, CompilingExporter) else plan.backend.name
    progress.report("loading the model", 0, 4)
    source = load_source(resolved, config, sample=sample, axes=axes)
    try:
        artifact = _export_source(source, out, backend, exporter, config, processor, started, resolved.hub)
    except (ExportError, ValidationError) as error:
        # Tracing may fail if the image size is dynamic, and the traced attention may give other results for padded audio.
        # Therefore export again with a fixed image size or with eager attention.
        fixed = source.with_fixed_images() if sample is None else None
        plain = source.with_plain_attention() if isinstance(error, ValidationError) else None
        other = fixed or plain
        if other is None:
            raise
        how = "for images of a fixed size" if fixed is not None else "with eager attention"
        logger.info("exporting %s again %s: %s", source.origin.id, how, error.message)
        artifact = _export_source(other, out, backend, exporter, config, processor, started, resolved.hub)
    progress.report("exported", 4, 4)
    seconds = artifact.manifest.steps[-1].seconds
    logger.info("exported %s for %s to %s in %.1f s", source.origin.id, source.task, out, seconds)
    return artifact


def check_export(resolved: ResolvedModel, plan: StagePlan, config: ExportConfig) -> None:
    """Check that a backend can export a model with these settings, before the model is loaded.

    Raises:
        TaskError: The backend does not export models of this task.
        ConfigError: The backend does not export models in this data type, or an option does not exist.
    """
    name, capability = plan.backend.name, plan.capability
    if not capability.does(resolved.task) and capability.consumes is not None:
        raise TaskError(
            f"The backend {name!r} does not compile models of the task {resolved.task!r} to the format {capability.produces}.",
            fix=f"export the model with backend={name!r} (--backend {name}) and without a format, and run the ONNX artifact.",
        )
    if not capability.does(resolved.task):
        raise TaskError(
            f"The backend {name!r} does not export models of the task {resolved.task!r}.",
            fix="use another backend=... (--backend), or leave backend out.",
        )
    if config.dtype not in capability.dtypes:
        raise ConfigError(
            f"The backend {name!r} does not export models in {config.dtype}.",
            fix=f"use dtype={' or '.join(capability.dtypes)}.",
        )
    check_names(f"The exporter of the backend {name!r}", "option", config.options, capability.options)


def _export_source(
    source: capture.Source,
    out: Path,
    backend: str | None,
    exporter: Exporter,
    config: ExportConfig,
    processor: Any,
    started: float,
    hub: HubOptions,
) -> Artifact:
    """Write an artifact of a source model and check it. The folder is removed after an error."""
    with staging(out, needs=source.nbytes) as folder:
        # Copy configs and tokenizers first, because the exporter may read them.
        if source.folder is not None:
            copy_companions(source.folder, folder, linked=True)
            if (transformer := transformer_folder(source.folder)) != source.folder:
                copy_companions(transformer, folder, linked=True)
        _write_configs(source, folder)
        if source.folder is not None and is_adapter(source.folder):
            # Existing files are not overwritten, so the adapter's own tokenizer has priority over the base model's.
            copy_companions(capture.base_of_adapter(source.folder, hub).folder, folder, linked=True)
        if processor is not None:
            processor.save_pretrained(folder)
        progress.report("computing reference outputs", 1, 4)
        cases = capture.cases_by_part(source)
        check_outputs(source, cases)
        changed = capture.padding_difference(source) if not task_spec(source.task).generates else None
        # Release the memory of the weights: after this line they are read only once, when they are written.
        capture.release_pages(source.weights)
        progress.report("tracing and converting", 2, 4)
        artifact = with_bounds(exporter.export(source, task=source.task, config=config, out=folder), source)
        artifact = replace(artifact, manifest=replace(artifact.manifest, quantization=source.quantization))
        progress.report("checking against PyTorch", 3, 4)
        try:
            validation = _check(artifact, backend, cases, config, hub, source)
        except ValidationError as error:
            if artifact.format == "onnx":
                raise
            raise ValidationError(
                error.message,
                fix="export to ONNX, which uses another converter (leave backend out), or pass a larger atol=...",
            ) from error
        if changed is not None:
            validation[PADDING_DIFFERENCE] = changed
        seconds = round(time.perf_counter() - started, 2)
        artifact = artifact.with_step(seconds=seconds, validation=validation)
    return Artifact(out, artifact.manifest)


def check_outputs(source: capture.Source, cases: Mapping[str, Sequence[capture.Case]]) -> None:
    """Check that the outputs of the PyTorch model match its task and are numbers.

    Raises:
        TaskError: The class of the model does not belong to the task.
        ExportError: An output contains NaN, because a weight is infinite or NaN.
    """
    results = [tensor for part in cases.values() for case in part for tensor in case.expected.values()]
    if any(tensor.is_floating_point() and tensor.isnan().any() for tensor in results):
        weights, buffers = source.model.named_parameters(), source.model.named_buffers()
        broken = [name for name, weight in weights if weight.is_floating_point() and not weight.isfinite().all()]
        # Buffers may be infinite: masks contain -inf.
        broken += [name for name, buffer in buffers if buffer.is_floating_point() and buffer.isnan().any()]
        if broken:
            raise ExportError(
                f"The PyTorch model computes NaN, because {len(broken)} of its weights contain NaN or infinite values: "
                f"{', '.join(broken[:3])}{', ...' if len(broken) > 3 else ''}.",
                fix="use a checkpoint with finite weights: for example, download it again, or take an earlier one of the training.",
            )
    expected = next(iter(cases.values()))[0].expected
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    if len(cases) == 1 and (difference := task_spec(source.task).difference(shapes)):
        raise TaskError(
            f"{source.architecture} {difference}.",
            fix="pass the task of the model with task=... If you wrote the task, correct the names and axes in TaskSpec.outputs.",
        )


def with_bounds(artifact: Artifact, source: capture.Source) -> Artifact:
    """Return the artifact with bounds of token ids and required tokens in the input specs of all graphs. Exporters need
    not set them.
    """
    components = []
    for component in artifact.components:
        bounds = source.bounds(stateful=component.stateful)
        # A float mask is added to the attention scores, so any value is valid.
        inputs = tuple(
            replace(
                spec,
                bounds=None if spec.dtype.startswith("float") else bounds.get(spec.name),
                required=source.required.get(spec.name),
            )
            for spec in component.inputs
        )
        components.append(replace(component, inputs=inputs))
    return replace(artifact, manifest=replace(artifact.manifest, components=tuple(components)))


def _write_configs(source: capture.Source, folder: Path) -> None:
    """Write the configs of a model in memory, or of an adapter's base model. The configs of a folder were copied
    before.
    """
    if (folder / "config.json").exists():
        return
    inner = getattr(source.model, "model", None)
    generation: Any = getattr(source.model, "generation_config", getattr(inner, "generation_config", None))
    with capture.quiet():
        for settings in (source.config, generation):
            if hasattr(settings, "save_pretrained"):
                settings.save_pretrained(folder)


def load_source(
    resolved: ResolvedModel,
    config: ExportConfig,
    *,
    sample: Mapping[str, torch.Tensor] | None = None,
    axes: Mapping[str, Mapping[int, str]] | None = None,
    stream: bool = False,
) -> capture.Source:
    """Load the PyTorch model and its sample inputs. The arguments are those of `export` and of `capture.load_source`."""
    model = resolved.module if resolved.module is not None else resolved.location
    return capture.load_source(
        model, task=resolved.task, config=config, hub=resolved.hub, sample=sample, axes=axes, stream=stream
    )


def _check(
    artifact: Artifact,
    backend: str | None,
    cases: Mapping[str, list[capture.Case]],
    config: ExportConfig,
    hub: HubOptions,
    source: capture.Source,
) -> dict[str, Any]:
    """Run every graph of the new artifact on its reference cases, and compare the results with the outputs of the
    PyTorch model. Some of the cases become the probes of the artifact.

    Raises:
        ValidationError: A case differs by more than the tolerance, or a row of a batch differs from the same row run
            alone.
    """
    dtype = artifact.dtype if artifact.manifest.quantization is None else capture.INTEGERS
    with opened(artifact, backend, hub) as sessions:
        comparison = compare_with_model(sessions.sessions, cases, config.atol, dtype, source.model)
        if source.name in sessions.sessions:
            session = sessions.sessions[source.name]
            comparison |= compare_with_sentence_transformers(artifact, session, source, config, hub)
        record_probes(artifact, probes_for(artifact, cases, source), sessions)
    return comparison


@contextmanager
def opened(artifact: Artifact, backend: str | None, hub: HubOptions, *, exact: bool = False) -> Iterator[OpenSessions]:
    """Open the graphs of a new artifact for a comparison, and close them at the end.

    Args:
        artifact: The artifact.
        backend: Name of the backend that exported it, or `None` for the backend that is selected for the CPU.
        hub: Hub options of the model.
        exact: Whether layers with quantized weights compute in float32.

    Raises:
        ExportError: The backend cannot run a graph.
    """
    devices = (DeviceSpec("cpu"),) if backend is None else registry.probe(registry.describe(backend)).devices
    on_host = artifact.manifest.run is None and any(device.type == "cpu" for device in devices)
    settings = RunPreferences(backend=backend, device="cpu" if on_host else None)
    where = "" if backend is None else f" on the backend {backend!r}"
    try:
        plan = make_plan(ResolvedModel.of_artifact(artifact, hub), settings)
        sessions = open_plan(plan, few_calls=True, states=False, exact=exact)
        try:
            yield sessions
        finally:
            sessions.close()
    except SessionError as error:
        raise ExportError(
            f"The exported graph of {artifact.manifest.architecture} does not run{where}: {error.message}",
            fix="export the model with another backend=..., or run the model with backend='pytorch'.",
        ) from error
