"""Resolve a model once: a Hub id, a folder, an artifact or a module in memory.

All loading starts with `resolve`. Its result, a `ResolvedModel`, is passed to the other functions, so that they need not
inspect the folder again.
"""

from __future__ import annotations

import logging
import os
import reprlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from ..artifact.atomic_folder_writing import checkpoint_weights
from ..artifact.gguf_files import GGUF, gguf_files
from ..artifact.hub import HubOptions, Location, locate
from ..artifact.manifest import MANIFEST, Artifact
from ..artifact.resolved_model import Kind, ResolvedModel
from ..artifact.sentence_settings import first_module_is_static, sentence_kind, sentence_settings, transformer_folder
from ..config import ExportConfig, check_type
from ..errors import ArtifactNotFoundError, ConfigError, TaskError, did_you_mean
from ..interfaces.task_registry import (
    any_graph_task,
    fitting_task,
    infer_adapter_task,
    infer_task,
    is_adapter,
    missing_config,
    read_config,
    task_spec,
)
from .foreign_folders import adopt, graphs_to_fetch, holds_graphs, subfolder_of_graphs, with_config
from .unsupported_libraries import check_heads, no_model

logger = logging.getLogger(__name__)

_GRAPHS = (".onnx", ".xml")
_SUBFOLDER = "onnx"


def resolve(
    model: Any,
    *,
    task: str | None = None,
    default_task: str | None = None,
    hub: HubOptions | None = None,
    file_name: str | None = None,
    variant: str | None = None,
    weights: bool = False,
    export: bool | None = None,
) -> ResolvedModel:
    """Resolve a model. A Hub id is downloaded if it is not in the cache.

    Args:
        model: Hub id, folder, artifact, accel model, or PyTorch module; or the path of a graph file or a GGUF file in a folder
            or in a Hub repository (`org/name/onnx/model_q4.onnx`).
        task: The task, if it cannot be inferred from the model.
        default_task: The task of the class that loads the model, for folders without a recorded task.
        hub: Options for downloads from the Hub, and the name of the GGUF file.
        file_name: The graph to open in a folder without a manifest of accel.
        variant: The graph to open, by the suffix of its name: `quantized`, `q4`, `fp16`, ...
        weights: Whether PyTorch weights are used even if the folder contains graphs.
        export: As in `from_pretrained`: `True` uses the weights, `False` refuses them.

    Raises:
        ArtifactNotFoundError: The model does not exist, or has no graph and `export=False`.
        TaskError: The task is unknown, or cannot be inferred.
        ConfigError: The argument is not a model.
    """
    hub = hub or HubOptions()
    if isinstance(model, ResolvedModel):
        return model
    unwrapped = getattr(model, "artifact", model)
    if isinstance(unwrapped, Artifact):
        return ResolvedModel.of_artifact(unwrapped, hub)
    if not isinstance(model, str | os.PathLike):
        if not hasattr(model, "forward"):
            raise ConfigError(
                f"The model is a {type(model).__name__}, which accel cannot load: {reprlib.repr(model)}.",
                fix="pass a Hub id, a folder, or a torch.nn.Module.",
            )
        return ResolvedModel(
            kind="module", id=type(model).__name__, task=_task_of_module(model, task), module=model, hub=hub
        )
    for word, value in (("file_name", file_name), ("variant", variant)):
        check_type(word, value, (str, NoneType))
    if not os.fspath(model):
        raise ConfigError(
            "The name of the model is empty.", fix="pass a Hub id or a folder. Pass `.` for the current folder."
        )
    weights = weights or export is True
    if (file := _gguf_named(model)) is not None:
        resolved = resolve(
            file.model, task=task, default_task=default_task, hub=_inside(hub, file, gguf_file=file.file),
            file_name=file_name, variant=variant, weights=weights, export=export,
        )  # fmt: skip
        return replace(resolved, id=os.fspath(model) if resolved.revision else resolved.id)
    named = _graph_named(model)
    if named is not None and not weights:
        if file_name is not None or variant is not None:
            raise ConfigError(
                f"The model {model} is the path of a graph, so file_name={file_name!r} and variant={variant!r} cannot choose "
                "another graph.",
                fix="pass the folder of the graph, or leave file_name and variant out.",
            )
        resolved = resolve(
            named.model,
            task=task,
            default_task=default_task,
            hub=_inside(hub, named),
            file_name=named.file,
            export=export,
        )
        return replace(resolved, id=os.fspath(model))
    if hub.gguf_file is not None:
        if file_name is not None or variant is not None:
            raise ConfigError(
                f"gguf_file={hub.gguf_file!r} names PyTorch weights, so file_name={file_name!r} and variant={variant!r} cannot "
                "choose a graph.",
                fix="leave out gguf_file, or leave out file_name and variant.",
            )
        return _of_gguf(locate(model, hub, want_graph=False), hub.gguf_file, task, default_task, hub, export)
    location = locate(
        model,
        hub,
        want_graph=False if weights else None if export is None else not export,
        choose_graphs=partial(graphs_to_fetch, os.fspath(model), file_name=file_name, variant=variant),
    )
    location = _static(location)
    folder = location.folder
    resolved = ResolvedModel(
        kind="weights", id=location.id, task=any_graph_task(), folder=folder, revision=location.revision, hub=hub
    )
    transformer = transformer_folder(folder)
    has_weights = (transformer / "config.json").is_file() and (resolved.has_weights or transformer != folder)
    adapter = is_adapter(folder)
    check_heads(folder, task or default_task)
    if not (weights and (has_weights or adapter or export)):
        nested = _nested(location, file_name) if variant is None else None
        if nested is not None:
            return replace(resolved, kind="artifact", task=nested.task, artifact=nested, folder=nested.path)
        if (folder / MANIFEST).is_file() and variant is None:
            artifact = _holding(file_name, folder)
            if artifact is not None:
                _tell_of_weights(artifact)
                return replace(resolved, kind="artifact", task=artifact.task, artifact=artifact, folder=artifact.path)
        if file_name is not None or variant is not None or holds_graphs(folder):
            requested_task = task or (_task_of_class(folder, default_task) if default_task is not None else None)
            folder, subfolder = with_config(location)
            artifact = adopt(folder, subfolder, file_name=file_name, task=requested_task, variant=variant)
            return replace(resolved, kind="foreign", task=artifact.task, artifact=artifact, folder=folder)
        inner = subfolder_of_graphs(folder) if not (has_weights or adapter) else None
        if inner is not None:
            inside = "/".join(part for part in (hub.subfolder, inner) if part)
            resolved = resolve(
                model, task=task, default_task=default_task, hub=replace(hub, subfolder=inside), export=export
            )
            return replace(resolved, id=location.id)
    if not has_weights and not adapter and not checkpoint_weights(folder) and (files := gguf_files(folder)):
        if len(files) > 1:
            names = ", ".join(path.name for path in files[:5])
            raise ConfigError(
                f"{folder} contains {len(files)} GGUF files ({names}{', ...' if len(files) > 5 else ''}).",
                fix=f"choose one of them: pass gguf_file={files[0].name!r}, or the path of the file.",
            )
        return _of_gguf(location, files[0].name, task, default_task, hub, export)
    if export is False:
        raise ArtifactNotFoundError(
            f"{folder} contains no exported graph, and export=False forbids exporting the model.",
            fix="leave export out, or export the model first: `accel export MODEL OUT`.",
        )
    if not adapter and not (transformer / "config.json").is_file():
        if holds_graphs(folder):
            raise missing_config(folder)
        if sentence_kind(folder):
            sentence_settings(folder).check_embeds()
        raise no_model(folder)
    if (folder / MANIFEST).is_file() and not resolved.has_weights:
        raise ArtifactNotFoundError(
            f"{folder} is an exported artifact without PyTorch weights, but PyTorch weights are required here.",
            fix="load the artifact with ORTModelFor...from_pretrained, or export the original PyTorch model.",
        )
    kind: Kind = "adapter" if adapter else "weights"
    return replace(resolved, kind=kind, task=_task_of_weights(folder, task, default_task, adapter=adapter))


def _static(location: Location) -> Location:
    """Return the location of a static embedding model in the form of a transformers folder. Other locations are returned unchanged."""
    if not first_module_is_static(location.folder):
        return location
    from ..capture import static_folder  # imports torch

    return replace(location, folder=static_folder(location.folder))


def _of_gguf(
    location: Location, name: str, task: str | None, default_task: str | None, hub: HubOptions, export: bool | None
) -> ResolvedModel:
    """Return a GGUF file as a resolved model, whose folder was written by accel and contains the config and the tokenizer."""
    file = location.folder / name
    if not file.is_file():
        names = [path.name for path in gguf_files(location.folder)]
        raise ArtifactNotFoundError(
            f"{location.id} has no GGUF file {name!r}.{did_you_mean(name, names)}",
            fix="check the argument gguf_file=..., or the name of the file.",
        )
    if export is False:
        raise ArtifactNotFoundError(
            f"{file} contains no exported graph, and export=False forbids exporting the model.",
            fix="leave export out, or export the model first: `accel export MODEL OUT`.",
        )
    from ..capture import gguf_folder  # imports torch

    folder = gguf_folder(file)
    inside = "/".join(part for part in (location.id, hub.subfolder, name) if part)
    return ResolvedModel(
        kind="weights",
        id=inside if location.revision else str(file),
        task=_task_of_weights(folder, task, default_task, adapter=False),
        folder=folder,
        revision=location.revision,
        hub=replace(hub, gguf_file=None, subfolder=""),
    )


def _inside(hub: HubOptions, named: _NamedFile, **changes: Any) -> HubOptions:
    """Return the Hub options with the subfolder of a file that the user named."""
    return replace(hub, subfolder="/".join(part for part in (hub.subfolder, named.subfolder) if part), **changes)


def _tell_of_weights(artifact: Artifact) -> None:
    """Warn if an artifact's folder also contains PyTorch weights, because its graphs may have been made from other
    weights.
    """
    recorded_names = {record.name for component in artifact.components for record in component.files}
    other_weights = [path.name for path in checkpoint_weights(artifact.path) if path.name not in recorded_names]
    if other_weights:
        logger.warning(
            "%s contains graphs and the PyTorch weights %s. accel opens the graphs, which may have been exported from other "
            "weights. Pass export=True to use the PyTorch weights.",
            artifact.path,
            ", ".join(other_weights),
        )


@dataclass(frozen=True, slots=True)
class _NamedFile:
    """A graph or GGUF file named by the user: the folder or Hub id, the subfolder if it has no config of its own, and the file
    name.
    """

    model: str
    subfolder: str
    file: str


def _graph_named(model: str | os.PathLike[str]) -> _NamedFile | None:
    """Return the graph file that a model's name refers to, local or on the Hub; `None` if the name is not a graph file."""
    text = os.fspath(model)
    path = Path(text).expanduser()
    if path.suffix not in _GRAPHS or path.is_dir():
        return None
    if path.is_file():
        folder = path.absolute().parent
        has_config = (folder / "config.json").is_file() or not (folder.parent / "config.json").is_file()
        return _NamedFile(*((str(folder), "") if has_config else (str(folder.parent), folder.name)), path.name)
    return _in_repository(text)


def _gguf_named(model: str | os.PathLike[str]) -> _NamedFile | None:
    """Return the GGUF file that a model's name refers to, local or on the Hub; `None` if the name is not a GGUF file."""
    path = Path(model).expanduser()
    if path.suffix != GGUF or path.is_dir():
        return None
    if path.is_file():
        return _NamedFile(str(path.absolute().parent), "", path.name)
    return _in_repository(os.fspath(model))


def _in_repository(text: str) -> _NamedFile | None:
    """Return the file of a Hub repository that a name such as `org/name/file` refers to; `None` for other names."""
    parts = text.split("/")
    if len(parts) < 3 or text.startswith((".", "/", "~")):
        return None
    return _NamedFile("/".join(parts[:2]), "/".join(parts[2:-1]), parts[-1])


def _holding(file_name: str | None, folder: Path) -> Artifact | None:
    """Return the artifact in a folder. With `file_name`, return the artifact of the folder or of a subfolder that contains
    this graph, or `None` if there is none.
    """
    artifact = Artifact.load(folder)
    if file_name is None or file_name in [component.file for component in artifact.components]:
        return artifact
    for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
        inner = Artifact.load(manifest.parent)
        if file_name in [component.file for component in inner.components]:
            return inner
    return None


def _nested(location: Location, file_name: str | None) -> Artifact | None:
    """Return the artifact in a subfolder such as `onnx`, if the config, the tokenizer and the modules lie in the parent folder.
    sentence-transformers saves models in this layout.
    """
    root = location.root or location.folder
    if not (root / "config.json").is_file() or (root / MANIFEST).is_file():
        return None
    if location.folder != root:
        places = [location.folder / MANIFEST]
    elif checkpoint_weights(root):
        # Check only the subfolder `onnx`. Other subfolders may contain artifacts that the user created from these weights.
        places = [root / _SUBFOLDER / MANIFEST]
    else:
        places = sorted(root.glob(f"*/{MANIFEST}"), key=lambda path: path.parent.name != _SUBFOLDER)
    for manifest in places:
        place = manifest.parent
        if not manifest.is_file():
            continue
        artifact = _seen_from(Artifact.load(place), root)
        files = [component.file for component in artifact.components]
        if file_name is None or file_name in files or f"{place.name}/{file_name}" in files:
            return artifact
    return None


def _seen_from(artifact: Artifact, root: Path) -> Artifact:
    """Return the artifact of a subfolder as an artifact of the parent folder `root`, which contains the config and the
    tokenizer. The paths of the graphs are changed accordingly.

    The config and tokenizer files are not recorded in the manifest, because another tool wrote them.
    """
    place = artifact.path.relative_to(root.absolute())
    components = tuple(
        replace(
            component,
            file=(place / component.file).as_posix(),
            files=tuple(replace(record, name=(place / record.name).as_posix()) for record in component.files),
        )
        for component in artifact.components
    )
    return Artifact(root.absolute(), replace(artifact.manifest, components=components, files=()))


def _task_of_module(module: Any, task: str | None) -> str:
    """Return the task of a module in memory: the requested task, the task of its class, or the task for any graph if it
    has no config.
    """
    config = getattr(module, "config", None)
    values = {**(config.to_dict() if config is not None else {}), "architectures": [type(module).__name__]}
    if task is not None:
        return fitting_task(task, values)
    return any_graph_task() if config is None else infer_task(values)


def _task_of_weights(folder: Path, task: str | None, default: str | None, *, adapter: bool) -> str:
    if task is not None:
        return fitting_task(task, read_config(folder))
    if default is not None:
        return _task_of_class(folder, default)
    return infer_adapter_task(folder) if adapter else infer_task(read_config(folder), folder)


def _task_of_class(folder: Path, default: str) -> str:
    """Return the task of a folder that is loaded by a class with the task `default`.

    For an embedding class, return the task with the pooling of the sentence embedder. If the pooling is not supported,
    return the task for hidden states; `encode` then raises an error with the reason.
    """
    spec = task_spec(default)
    place = folder if (transformer_folder(folder) / "config.json").is_file() else folder.parent
    if not spec.embeds or not sentence_kind(place) or not task_spec(infer_task({}, place)).embeds:
        return spec.name
    try:
        sentence_settings(place).check_embeds()
    except (ConfigError, TaskError) as error:
        logger.info("%s returns only hidden states, without pooling: %s", place, error.message)
        return spec.name
    return infer_task({}, place)


def artifact_of(model: Any, *, hub: HubOptions | None = None) -> Artifact:
    """Return the artifact of a model.

    Raises:
        ArtifactNotFoundError: The model has only PyTorch weights.
    """
    resolved = resolve(model, hub=hub)
    if resolved.artifact is None:
        raise ArtifactNotFoundError(
            f"{resolved.id} is not an exported artifact: it contains PyTorch weights.",
            fix="export the model first: `accel export MODEL OUT`.",
        )
    return resolved.artifact


def original(resolved: ResolvedModel, *, local_files_only: bool = False) -> ResolvedModel:
    """Return the PyTorch model that an artifact was made from, or the model itself if it is a PyTorch model.

    Raises:
        ArtifactNotFoundError: The artifact does not record its source, or the source does not exist any more.
    """
    if resolved.artifact is None and resolved.module is None:
        return resolved
    source = resolved.artifact.manifest.source if resolved.artifact is not None else None
    if resolved.kind == "foreign" or source is None:
        raise ArtifactNotFoundError(
            f"{resolved.id} does not record the PyTorch model from which it was exported.",
            fix="pass the PyTorch model with against=... (--against).",
        )
    hub = replace(
        resolved.hub,
        revision=source.revision,
        subfolder="",
        local_files_only=local_files_only or resolved.hub.local_files_only,
    )
    return resolve(source.id, task=resolved.task, hub=hub, weights=True)


def recorded_export(artifact: Artifact) -> ExportConfig:
    """Return the recorded export settings of an artifact, changed to float32. They are used to load the PyTorch model with which
    the artifact is compared.

    The export step of the PyTorch model has no parent. An export step with a parent belongs to an engine that was compiled
    from a graph, and has different settings, so it is skipped.
    """
    exports = (step for step in artifact.manifest.steps if step.stage == "export" and step.parent is None)
    recorded = next((step.config for step in exports), {})
    return replace(ExportConfig.from_dict(recorded), dtype="float32", atol=None)
