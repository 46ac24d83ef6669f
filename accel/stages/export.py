"""`accel.export`: model to artifact, checked against PyTorch before the folder appears; and the exports that are kept."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import capture, progress
from ..artifact.checksums import folder_digest
from ..artifact.home import accel_home
from ..artifact.hub import HubOptions
from ..artifact.manifest import MANIFEST, PADDING_DIFFERENCE, SCHEMA_VERSION, Artifact
from ..artifact.resolved_model import Resolved
from ..artifact.writing import check_output, copy_companions, discard, staging, tool_versions
from ..backends import registry
from ..backends.plan import Plan
from ..config import ExportConfig, checked_arguments
from ..errors import (
    ConfigError,
    ExportError,
    IntegrityError,
    OutputFolderError,
    SchemaError,
    SessionError,
    TaskError,
    ValidationError,
    did_you_mean,
)
from ..interfaces.protocols import Exporter, OpenRequest
from ..interfaces.specs import BackendSpec, DeviceSpec
from ..interfaces.task_registry import is_adapter, task_spec
from .adoption import adopt_weights
from .graph_comparison import check_rows, compare, compare_whole, merged
from .resolution import resolve

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@checked_arguments(config=ExportConfig)
def export(
    model: str | os.PathLike[str] | torch.nn.Module,
    out: str | os.PathLike[str],
    *,
    task: str | None = None,
    backend: str | None = None,
    format: str = "onnx",
    config: ExportConfig | None = None,
    sample: Mapping[str, torch.Tensor] | None = None,
    axes: Mapping[str, Mapping[int, str]] | None = None,
    processor: Any = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    subfolder: str = "",
    local_files_only: bool = False,
    trust_remote_code: bool = False,
    **settings: Any,
) -> Artifact:
    """Export a model, compare it with PyTorch on five shapes, and only then make the folder appear.

    Takes 4 to 20 s for encoders. Memory peaks 0.7 GB above the weights where these are mapped from safetensors of the same dtype, and below
    twice the weights plus 1 GiB where the model has them in memory of its own.

    Args:
        model: Hub id, transformers folder, PEFT adapter folder, or a module in memory.
        out: Folder to make; must not exist or be empty.
        task: The name of a task, or another word for it; inferred from the config when `None`.
        backend: Who exports; the owner of `format` when `None`. A backend with one format of its own decides it.
        format: `onnx` (default) or another backend's format.
        config: How; its fields may also be given as keyword arguments (`dtype="float16"`).
        sample: Inputs to trace with instead of our own; batch 1 or a mask without padding is repaired.
        axes: Names of the axes of `sample` that may vary.
        processor: Tokenizer or processor to save beside a module in memory.
        revision, token, cache_dir, subfolder, local_files_only, trust_remote_code: As in transformers.
        **settings: Fields of `ExportConfig`.

    Raises:
        TaskError: The task is unknown or does not fit the model.
        ExportError: The model cannot be captured.
        ValidationError: The graph differs from the PyTorch model by more than the tolerance, or a row of a batch from the same row
            alone.
        OutputFolderError: `out` is the input or not empty.
        BackendUnavailableError: The exporter's requirements are missing.
    """
    config = _settings(config, settings)
    spec = _exporter_spec(format, backend)
    hub = HubOptions(
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        subfolder=subfolder,
        trust_remote_code=trust_remote_code,
    )
    target = check_output(out, Path(model) if isinstance(model, str | os.PathLike) else None)
    resolved = resolve(model, task=task, hub=hub, weights=True, export=True)
    with capture.modes_kept(model):
        return export_resolved(
            resolved, target, spec=spec, config=config, sample=sample, axes=axes, processor=processor
        )


def _settings(config: ExportConfig | None, settings: Mapping[str, Any]) -> ExportConfig:
    if not settings:
        return config or ExportConfig()
    return ExportConfig.from_dict({**(config.to_dict() if config else {}), **settings})


def _exporter_spec(format: str, backend: str | None) -> BackendSpec:
    """Who exports: a backend that is named decides the format unless it can make the one asked for."""
    if backend is not None:
        spec = registry.describe(backend)
        if spec.capability("export", produces=format) is None:
            made = [c.produces for c in spec.capabilities if c.stage == "export" and c.produces]
            format = made[0] if made else format
    return registry.owner("export", format, backend)


@capture.one_thread_at_a_time()
def export_resolved(
    resolved: Resolved,
    out: Path,
    *,
    spec: BackendSpec,
    config: ExportConfig,
    sample: Mapping[str, torch.Tensor] | None = None,
    axes: Mapping[str, Mapping[int, str]] | None = None,
    processor: Any = None,
) -> Artifact:
    """Export a model that is already on this machine; see `export`, also for the shapes of `sample`."""
    started = time.perf_counter()
    capability = spec.capability("export", task=resolved.task)
    if capability is not None and not capability.does(resolved.task):
        raise TaskError(
            f"Backend {spec.name!r} does not export models for {resolved.task}.",
            fix="export it with another backend=... (--backend), or leave that out.",
        )
    if capability is not None and config.dtype not in capability.dtypes:
        raise ConfigError(
            f"Backend {spec.name!r} does not export {config.dtype}.", fix=f"use dtype={' or '.join(capability.dtypes)}."
        )
    known = capability.options if capability is not None else ()
    for name in config.options:
        if name not in known:
            raise ConfigError(
                f"The exporter of backend {spec.name!r} has no option {name!r}.{did_you_mean(name, known)}",
                fix=f"use {', '.join(known)}." if known else "leave options=... (--option) out.",
            )
    exporter: Exporter = registry.worker(spec, "export")
    progress.report("loading the model", 0, 4)
    source = load_source(resolved, config, sample=sample, axes=axes)
    try:
        artifact = _export_source(source, out, spec, exporter, config, processor, started, resolved.hub)
    except (ExportError, ValidationError) as error:
        # The model computes at any image size, and its trace does not; or what padded sounds attend to differs.
        fixed = source.with_fixed_images() if sample is None else None
        plain = source.with_plain_attention() if isinstance(error, ValidationError) else None
        other = fixed or plain
        if other is None:
            raise
        how = "for images of one size" if fixed is not None else "with its plain attention"
        logger.info("exporting %s again %s: %s", source.origin.id, how, error.message)
        artifact = _export_source(other, out, spec, exporter, config, processor, started, resolved.hub)
    progress.report("exported", 4, 4)
    seconds = artifact.manifest.steps[-1].seconds
    logger.info("exported %s for %s to %s in %.1f s", source.origin.id, source.task, out, seconds)
    return artifact


def _export_source(
    source: capture.Source,
    out: Path,
    spec: BackendSpec,
    exporter: Exporter,
    config: ExportConfig,
    processor: Any,
    started: float,
    hub: HubOptions,
) -> Artifact:
    """Write and check one artifact of a source; nothing stays behind where that fails."""
    with staging(out, needs=source.nbytes) as folder:
        # Configs and tokenizers first: the exporter may want to read them, and never overwrites its own files.
        if source.folder is not None:
            copy_companions(source.folder, folder)
        _write_configs(source, folder)
        if source.folder is not None and is_adapter(source.folder):
            # Its own tokenizer comes first, where it has one.
            copy_companions(capture.base_of_adapter(source.folder, hub).folder, folder)
        if processor is not None:
            processor.save_pretrained(folder)
        progress.report("computing reference outputs", 1, 4)
        cases = capture.cases_by_part(source)
        changed = capture.padding_difference(source) if not task_spec(source.task).generates else None
        # From here on the model's weights are read once, as they are written.
        capture.release_pages(source.weights)
        progress.report("tracing and converting", 2, 4)
        artifact = _bounded(exporter.export(source, task=source.task, config=config, out=folder), source)
        artifact = replace(artifact, manifest=replace(artifact.manifest, quantization=source.quantization))
        progress.report("checking against PyTorch", 3, 4)
        try:
            validation = _check(artifact, spec, cases, config, hub, source.model)
        except ValidationError as error:
            if artifact.format == "onnx":
                raise
            raise ValidationError(
                error.message,
                fix="export to ONNX (leave backend=... out), which another converter makes; or pass a larger atol=...",
            ) from error
        if changed is not None:
            validation[PADDING_DIFFERENCE] = changed
        seconds = round(time.perf_counter() - started, 2)
        artifact = artifact.with_step(seconds=seconds, validation=validation)
    return Artifact(out, artifact.manifest)


def _bounded(artifact: Artifact, source: capture.Source) -> Artifact:
    """With the bounds of ids, and the tokens that rows must hold, in the specs of all graphs; exporters need not know them."""
    components = []
    for component in artifact.components:
        bounds = source.bounds(stateful=component.stateful)
        # A mask of floats is added to what attention computes.
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
    """The configs of a model that comes from memory, or of an adapter's base, whose folder is another. A folder's own are copied."""
    if (folder / "config.json").exists():
        return
    inner = getattr(source.model, "model", None)
    generation: Any = getattr(source.model, "generation_config", getattr(inner, "generation_config", None))
    with capture.quiet():
        for settings in (source.config, generation):
            if hasattr(settings, "save_pretrained"):
                settings.save_pretrained(folder)


def load_source(
    resolved: Resolved,
    config: ExportConfig,
    *,
    sample: Mapping[str, torch.Tensor] | None = None,
    axes: Mapping[str, Mapping[int, str]] | None = None,
) -> capture.Source:
    """The PyTorch model, loaded, and what it is traced with; see `export` for the shapes of `sample`."""
    model = resolved.module if resolved.module is not None else resolved.location
    return capture.load_source(model, task=resolved.task, config=config, hub=resolved.hub, sample=sample, axes=axes)


def _check(
    artifact: Artifact,
    spec: BackendSpec,
    cases: Mapping[str, list[capture.Case]],
    config: ExportConfig,
    hub: HubOptions,
    model: torch.nn.Module,
) -> dict[str, Any]:
    """Run every graph of the new artifact on its reference cases, as the model answered them.

    Raises:
        ValidationError: A case differs by more than the tolerance, or a row of a batch from the same row alone.
    """
    probe = registry.probe(spec)
    made_for = DeviceSpec.parse(artifact.manifest.run.device).type if artifact.manifest.run is not None else "cpu"
    device = next(
        (d for d in probe.devices if d.type == made_for), probe.devices[0] if probe.devices else DeviceSpec("cpu")
    )
    request = OpenRequest(device=device, trust_remote_code=hub.trust_remote_code, few_calls=True)
    word = artifact.dtype if artifact.manifest.quantization is None else capture.INTEGERS
    sessions = registry.load(spec).open(artifact, request)
    try:
        if len(sessions) == 1 and not any(component.stateful for component in artifact.components):
            (name,) = sessions
            found = compare_whole(sessions[name], cases[name], config.atol, word, model)
        else:
            found = merged({name: compare(sessions[name], cases[name], config.atol, word) for name in sessions})
        return check_rows(sessions, cases, found, config.atol, word, model)
    except SessionError as error:
        raise ExportError(
            f"The new graph of {artifact.manifest.architecture} does not run on backend {spec.name!r}: {error.message}",
            fix="export it with another backend=..., or run it with backend='pytorch'.",
        ) from error
    finally:
        for opened in sessions.values():
            opened.close()


def with_artifact(plan: Plan) -> Plan:
    """The plan with its artifact: the artifact itself, the weights where PyTorch was named, or an export, which is kept.

    Raises:
        BackendUnavailableError: Nothing here runs the export; the message is the table of everything considered.
    """
    if plan.artifact is not None:
        return plan
    plan.check()
    if plan.exporter is None:
        return plan.with_artifact(weights_of(plan.model, plan.config))
    return plan.with_artifact(cached_export(plan.model, spec=plan.exporter, config=plan.config))


def folder_identity(artifact: Artifact) -> tuple[int, int] | None:
    """Which folder it is, of those that have had its name; `None` where there is none."""
    try:
        status = artifact.path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def was_removed(artifact: Artifact, before: tuple[int, int] | None) -> bool:
    """Whether a kept export went away (`accel cache clear` in another process) since its folder was the one `before`."""
    there = before is not None and folder_identity(artifact) == before
    return not there and artifact.path.parent == accel_home() / "exports"


def weights_of(resolved: Resolved, config: ExportConfig | None = None) -> Artifact:
    """The PyTorch weights of a model as an artifact that PyTorch runs; nothing is written."""
    return adopt_weights(resolved.location, task=resolved.task, config=config or ExportConfig(), hub=resolved.hub)


def source_digest(resolved: Resolved) -> str:
    """Identifies all that a model is made of: its folder, the base of an adapter, and code in another repository.

    Raises:
        ArtifactNotFoundError: The base of an adapter is not to be found.
    """
    folders = [resolved.location.folder]
    if is_adapter(folders[0]):
        folders.append(capture.base_of_adapter(folders[0], resolved.hub).folder)
    parts = [folder_digest(folder) for folder in folders]
    if resolved.hub.trust_remote_code:
        parts += [code for folder in folders for code in capture.code_elsewhere(folder, resolved.hub)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest() if len(parts) > 1 else parts[0]


def cached_export(resolved: Resolved, *, spec: BackendSpec, config: ExportConfig) -> Artifact:
    """Export into `ACCEL_HOME`, or find the export made there before from the same files, settings and versions."""
    location = resolved.location
    key = {
        "source": source_digest(resolved),
        "task": resolved.task,
        "exporter": spec.name,
        "config": config.to_dict(),
        "versions": tool_versions("torch", "transformers", "onnxscript", "peft", "timm", *spec.requires),
        "schema": SCHEMA_VERSION,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    slug = Path(location.id).name.replace(" ", "_")[:60] or "model"
    folder = accel_home() / "exports" / f"{slug}-{digest}"
    if (folder / MANIFEST).is_file():
        logger.info("using the export of %s in %s", location.id, folder)
        try:
            return Artifact.load(folder)
        except (IntegrityError, SchemaError) as error:
            logger.warning("%s Exporting it again.", error.message)
    # Damaged, or left over from a removal that was interrupted.
    discard(folder)
    try:
        artifact = export_resolved(resolved, folder, spec=spec, config=config)
    except OutputFolderError as error:
        if (folder / MANIFEST).is_file():
            # Another process exported the same model at the same time and was first.
            return Artifact.load(folder)
        raise OutputFolderError(
            f"The export of {location.id} cannot be kept: {error.message}",
            fix="set ACCEL_HOME to a folder that can be written and has room, or export the model into a folder of your own: "
            "accel export MODEL OUT.",
        ) from error
    logger.warning("%s held no exported graph: exported it once, kept in %s.", location.id, folder)
    return artifact
