"""`accel.export`, and the cached exports of `from_pretrained`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import capture
from ..artifact.atomic_folder_writing import check_output, discard, tool_versions
from ..artifact.checksums import folder_digest
from ..artifact.home_folder import accel_home
from ..artifact.hub import HubOptions
from ..artifact.manifest import MANIFEST, SCHEMA_VERSION, Artifact
from ..artifact.resolved_model import ResolvedModel
from ..backends.plan import Plan
from ..backends.stage_backend_selection import SchemePlan, StagePlan, plan_scheme, plan_stage
from ..config import ExportConfig, QuantizeConfig, checked_arguments
from ..errors import (
    IntegrityError,
    OutputFolderError,
    SchemaError,
)
from ..interfaces.task_registry import is_adapter
from .checked_export import export_resolved
from .compiled_export import check_used, compile_artifact, compiles
from .foreign_folders import weights_of
from .quantized_export import export_to_scheme
from .resolution import artifact_of, resolve

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_WEIGHTS = (".safetensors", ".bin", ".gguf")
"""Suffixes of files with PyTorch weights. Folders with weights and ONNX graphs are exported from the weights."""


@checked_arguments(config=ExportConfig)
def export(
    model: str | os.PathLike[str] | torch.nn.Module,
    out: str | os.PathLike[str],
    *,
    task: str | None = None,
    backend: str | None = None,
    format: str | None = None,
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
    gguf_file: str | None = None,
    quantize: str | QuantizeConfig | None = None,
    **settings: Any,
) -> Artifact:
    """Export a model and compare the graph with PyTorch on five shapes. The output folder appears only if the
    comparison passes.

    Takes 4 to 20 s for encoders. Peak memory is 0.7 GB above the weights if they are memory-mapped from safetensors of
    the same dtype, and less than twice the weights plus 1 GiB if the model holds them in memory.

    Args:
        model: Hub id, transformers folder, PEFT adapter folder, GGUF file, or a module in memory. For a format that is compiled
            from ONNX graphs (`tensorrt_rtx`): also an ONNX artifact, for example a quantized artifact.
        out: The output folder; must be missing or empty.
        task: The name of a task or a synonym; inferred from the config when `None`.
        backend: The backend that exports. When `None`, the default backend for `format`.
        format: `onnx` or another backend's format. When `None`, `onnx`, or the named backend's own format if the backend does
            not write ONNX.
        config: Settings; its fields may also be passed as keyword arguments (`dtype="float16"`).
        sample: Example inputs to trace with, instead of generated inputs. A batch of one row, or a mask without
            padding, is extended.
        axes: Names of the dynamic axes of `sample`, by input name and axis index.
        processor: Tokenizer or processor to save next to a module in memory.
        revision, token, cache_dir, subfolder, local_files_only, trust_remote_code, gguf_file: As in transformers.
        quantize: Scheme or settings of a quantization that needs no calibration data, such as `"weight-int4"`. The artifact is then
            optimized (level O2, for backends that have it) and quantized, as with `accel convert --scheme`.
        **settings: Fields of `ExportConfig`.

    Raises:
        ConfigError: A setting is invalid, or the named backend does not write this format.
        TaskError: The task is unknown or does not fit the model.
        ExportError: The model cannot be traced or converted.
        ValidationError: The graph differs from the PyTorch model by more than the tolerance, or a row of a batch differs from the
            same row alone.
        OutputFolderError: `out` is the input or is not empty.
        BackendUnavailableError: A package that the exporter requires is not installed.
    """
    config = ExportConfig.merged(config, settings)
    plan = plan_stage("export", format, backend)
    hub = HubOptions(
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        subfolder=subfolder,
        trust_remote_code=trust_remote_code,
        gguf_file=gguf_file,
    )
    target = check_output(out, Path(model) if isinstance(model, str | os.PathLike) else None)
    if compiles(plan) and (graphs := _graphs(model)) is not None:
        check_used(graphs, config, task=task, sample=sample, axes=axes, processor=processor, quantize=quantize)
        return compile_artifact(graphs, target, plan=plan, config=config)
    resolved = resolve(model, task=task, hub=hub, weights=True, export=True)
    inputs = {"sample": sample, "axes": axes, "processor": processor}
    with capture.modes_kept(model):
        if quantize is None:
            return export_resolved(resolved, target, plan=plan, config=config, **inputs)
        scheme = plan_scheme(quantize, exporter=plan, backend=backend)
        return export_to_scheme(resolved, target, plan=scheme, config=config, **inputs)


def _graphs(model: Any) -> Artifact | None:
    """Return a model that already is an artifact or a folder of ONNX graphs; `None` for a model with PyTorch weights."""
    if isinstance(model, Artifact):
        return model
    if not isinstance(model, str | os.PathLike):
        return None
    folder = Path(model)
    if (folder / MANIFEST).is_file():
        return Artifact.load(folder)
    has_weights = any(path for suffix in _WEIGHTS for path in folder.glob(f"*{suffix}"))
    return artifact_of(folder) if not has_weights and any(folder.rglob("*.onnx")) else None


def with_artifact(plan: Plan) -> Plan:
    """Return the plan with its artifact: the model itself, its PyTorch weights if the PyTorch backend was named, or a
    cached export.

    Raises:
        BackendUnavailableError: No backend can run the export. The message contains the table of all backends.
    """
    if plan.artifact is not None:
        return plan
    plan.check()
    if plan.exporter is None:
        return plan.with_artifact(weights_of(plan.model, plan.config))
    return plan.with_artifact(
        cached_export(plan.model, plan.exporter, config=plan.config, quantization=plan.quantization)
    )


def folder_identity(artifact: Artifact) -> tuple[int, int] | None:
    """Return the device number and inode of an artifact's folder; `None` if the folder does not exist."""
    try:
        status = artifact.path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def was_removed(artifact: Artifact, before: tuple[int, int] | None) -> bool:
    """Return whether the folder of a cached export was removed or replaced, for example by `accel cache clear` in
    another process.

    `before` is the earlier result of `folder_identity`.
    """
    unchanged = before is not None and folder_identity(artifact) == before
    return not unchanged and artifact.path.parent == accel_home() / "exports"


def source_digest(resolved: ResolvedModel) -> str:
    """Return a digest of a model's files: its folder, the base model of an adapter, and code in other repositories.

    Raises:
        ArtifactNotFoundError: The base model of an adapter does not exist.
    """
    folders = [resolved.location.folder]
    if is_adapter(folders[0]):
        folders.append(capture.base_of_adapter(folders[0], resolved.hub).folder)
    parts = [folder_digest(folder) for folder in folders]
    if resolved.hub.trust_remote_code:
        parts += [code for folder in folders for code in capture.code_elsewhere(folder, resolved.hub)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest() if len(parts) > 1 else parts[0]


def cached_export(
    resolved: ResolvedModel, plan: StagePlan, *, config: ExportConfig, quantization: SchemePlan | None = None
) -> Artifact:
    """Export a model into `ACCEL_HOME`, or load a cached export with the same files, settings and package versions.

    With `quantization`, the export is also optimized and quantized.
    """
    location = resolved.location
    key = {
        "source": source_digest(resolved),
        "task": resolved.task,
        "exporter": plan.backend.name,
        "config": config.to_dict(),
        "versions": tool_versions("torch", "transformers", "onnxscript", "peft", "timm", *plan.backend.requires),
        "schema": SCHEMA_VERSION,
    }
    if quantization is not None:
        key["quantization"] = quantization.to_dict()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    slug = Path(location.id).name.replace(" ", "_")[:60] or "model"
    folder = accel_home() / "exports" / f"{slug}-{digest}"
    if (folder / MANIFEST).is_file():
        logger.info("using the export of %s in %s", location.id, folder)
        try:
            return Artifact.load(folder)
        except (IntegrityError, SchemaError) as error:
            logger.warning(
                "The cached export of %s is damaged and will be exported again: %s", location.id, error.message
            )
    # The cached export is damaged, or an interrupted removal left parts of it.
    discard(folder)
    try:
        if quantization is None:
            artifact = export_resolved(resolved, folder, plan=plan, config=config)
        else:
            artifact = export_to_scheme(resolved, folder, plan=quantization, config=config)
    except OutputFolderError as error:
        if (folder / MANIFEST).is_file():
            # Another process exported the same model at the same time.
            return Artifact.load(folder)
        raise OutputFolderError(
            f"The export of {location.id} cannot be saved in the cache folder of accel: {error.message}",
            fix="set the environment variable ACCEL_HOME to a writable folder with free space, or export the model into your own "
            "folder: accel export MODEL OUT.",
        ) from error
    logger.warning("%s has no exported graph, so accel exported it and saved the export in %s.", location.id, folder)
    return artifact
