"""`accel.export`: model to artifact, checked against PyTorch before the folder appears."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from . import capture, progress, registry
from .artifact import MANIFEST, PADDING_DIFFERENCE, Artifact, check_output, copy_companions, staging
from .config import ExportConfig
from .errors import ConfigError, ExportError, IntegrityError, OutputFolderError, ValidationError
from .hub import HubOptions, Location, locate
from .interfaces import Session
from .specs import BackendSpec, DeviceSpec
from .tasks import read_config, task_spec

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


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

    Takes 4 to 20 s for encoders; memory peaks below three times the weights plus 1 GiB.

    Args:
        model: Hub id, transformers folder, PEFT adapter folder, or a module in memory.
        out: Folder to make; must not exist or be empty.
        task: One of `accel.tasks.TASKS`; inferred from the config when `None`.
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
        ValidationError: The graph differs from the PyTorch model by more than the tolerance.
        OutputFolderError: `out` is the input or not empty.
        BackendUnavailableError: The exporter's requirements are missing.
    """
    config = _settings(config, settings)
    if not isinstance(model, str | os.PathLike) and not hasattr(model, "forward"):
        raise ConfigError(f"{model!r} is not a model.", fix="pass a Hub id, a folder, or a torch.nn.Module.")
    if task is not None:
        task = task_spec(task).name
    spec = _exporter_spec(format, backend)
    hub = HubOptions(
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        subfolder=subfolder,
        trust_remote_code=trust_remote_code,
    )
    path = model if isinstance(model, str | os.PathLike) else None
    target = check_output(out, Path(path) if path is not None else None)
    location = locate(path, hub, want_graph=False) if path is not None else cast("torch.nn.Module", model)
    return export_located(
        location, target, task=task, spec=spec, config=config, hub=hub, sample=sample, axes=axes, processor=processor
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


def export_located(
    location: Location | torch.nn.Module,
    out: Path,
    *,
    task: str | None,
    spec: BackendSpec,
    config: ExportConfig,
    hub: HubOptions,
    sample: Mapping[str, torch.Tensor] | None = None,
    axes: Mapping[str, Mapping[int, str]] | None = None,
    processor: Any = None,
) -> Artifact:
    """Export a model that is already on this machine; see `export`."""
    started = time.perf_counter()
    capability = spec.capability("export")
    if capability is not None and config.dtype not in capability.dtypes:
        raise ConfigError(
            f"Backend {spec.name!r} does not export {config.dtype}.", fix=f"use dtype={' or '.join(capability.dtypes)}."
        )
    exporter = registry.load(spec).exporter()
    if exporter is None:
        raise ExportError(f"The backend {spec.name!r} has no exporter.", fix="leave backend=... out.")
    progress.report("loading the model", 0, 4)
    source = capture.load_source(location, task=task, config=config, hub=hub, sample=sample, axes=axes)
    with staging(out) as folder:
        # Configs and tokenizers first: the exporter may want to read them, and never overwrites its own files.
        if source.folder is not None:
            copy_companions(source.folder, folder)
        if processor is not None:
            processor.save_pretrained(folder)
        progress.report("computing reference outputs", 1, 4)
        cases = capture.cases_by_part(source)
        changed = capture.padding_difference(source) if not task_spec(source.task).generates else None
        progress.report("tracing and converting", 2, 4)
        artifact = exporter.export(source, task=source.task, config=config, out=folder)
        progress.report("checking against PyTorch", 3, 4)
        validation = _check(artifact, spec, cases, config)
        if changed is not None:
            validation[PADDING_DIFFERENCE] = changed
        seconds = round(time.perf_counter() - started, 2)
        artifact = artifact.with_step(seconds=seconds, validation=validation)
    progress.report("exported", 4, 4)
    logger.info("exported %s for %s to %s in %.1f s", source.origin.id, source.task, out, seconds)
    return Artifact(out, artifact.manifest)


def _check(
    artifact: Artifact, spec: BackendSpec, cases: Mapping[str, list[capture.Case]], config: ExportConfig
) -> dict[str, Any]:
    """Run every graph of the new artifact on its reference cases.

    Raises:
        ValidationError: A case differs by more than the tolerance.
    """
    from .config import SessionOptions

    probe = registry.probe(spec)
    device = next(
        (d for d in probe.devices if d.type == "cpu"), probe.devices[0] if probe.devices else DeviceSpec("cpu")
    )
    sessions = registry.load(spec).open(artifact, device=device, options={}, session=SessionOptions())
    try:
        return merged({name: compare(sessions[name], cases[name], config.atol, artifact.dtype) for name in sessions})
    finally:
        for opened in sessions.values():
            opened.close()


def merged(found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The comparisons of several graphs as one: the worst of them, and each under `components`."""
    if len(found) == 1:
        return next(iter(found.values()))
    worst = max(found.values(), key=lambda one: one["max_abs_difference"] / one["tolerance"])
    return {**worst, "components": dict(found)}


def compare(session: Session, cases: list[capture.Case], atol: float | None, dtype: str) -> dict[str, Any]:
    """Largest absolute difference from the expected outputs over all cases, as the manifest records it.

    Raises:
        ValidationError: It is above the tolerance.
    """
    found = differences(session, cases, atol, dtype)
    if not found["max_abs_difference"] <= found["tolerance"]:
        raise ValidationError(
            f"The result differs from the original by {found['max_abs_difference']:.3g} at {found['worst']}; "
            f"accepted is {found['tolerance']:.3g}.",
            fix="pass a larger atol=... if this precision is enough; otherwise the result is wrong: report it.",
        )
    return found


def differences(session: Session, cases: list[capture.Case], atol: float | None, dtype: str) -> dict[str, Any]:
    """What `compare` records, without a verdict: the largest difference, where it was, and the tolerance."""
    wanted = {spec.name for spec in session.inputs if spec.pair is None}
    worst, where, scale = -1.0, {}, 0.0
    shapes = []
    for first in progress.track(cases, "checking"):
        state = session.new_state(first.sizes["batch"]) if first.stateful else None
        case: capture.Case | None = first
        while case is not None:
            found = session.run({n: t for n, t in case.feeds.items() if n in wanted}, state=state)
            if case.skip:
                found = {name: tensor[:, case.skip :] for name, tensor in found.items()}
            difference, size = capture.max_difference(found, case.expected)
            shapes.append(dict(case.sizes))
            scale = max(scale, size)
            if not difference <= worst:
                worst, where = difference, dict(case.sizes)
            case = case.then
    return {
        "max_abs_difference": worst,
        "tolerance": capture.tolerance(atol, dtype, scale),
        "worst": where,
        "shapes": shapes,
    }


def graph_location(location: Location) -> bool:
    """Whether a folder is an artifact or holds ONNX graphs, as opposed to PyTorch weights alone."""
    from .layouts import graph_files

    folder = location.folder
    if (folder / MANIFEST).is_file() or graph_files(folder):
        return True
    return registry.backend_for_layout([p.name for p in folder.iterdir()]) is not None


def cached_export(
    location: Location, *, task: str | None, spec: BackendSpec, config: ExportConfig, hub: HubOptions
) -> Artifact:
    """Export into `ACCEL_HOME`, or find the export made there before from the same files, settings and versions."""
    import hashlib
    import json

    from .artifact import accel_home, tool_versions

    key = {
        "source": capture.folder_digest(location.folder),
        "task": task or _inferred(location.folder),
        "exporter": spec.name,
        "config": config.to_dict(),
        "versions": tool_versions("torch", "transformers", "onnxscript", *spec.requires),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    slug = Path(location.id).name.replace(" ", "_")[:60] or "model"
    folder = accel_home() / "exports" / f"{slug}-{digest}"
    if (folder / MANIFEST).is_file():
        logger.info("using the export of %s in %s", location.id, folder)
        try:
            return Artifact.load(folder)
        except IntegrityError as error:
            logger.warning("%s Exporting it again.", error.message)
            shutil.rmtree(folder)
    try:
        artifact = export_located(location, folder, task=task, spec=spec, config=config, hub=hub)
    except OutputFolderError:
        # Another process exported the same model at the same time and was first.
        return Artifact.load(folder)
    logger.warning("%s held no exported graph: exported it once, kept in %s.", location.id, folder)
    return artifact


def _inferred(folder: Path) -> str:
    from .tasks import infer_task

    config = read_config(folder)
    return infer_task(config, folder) if config else "adapter"
