"""Folders without our manifest as artifacts: graphs of other tools, read by the backend that owns their format, and PyTorch weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from .. import progress
from ..artifact.hub import HubOptions, Location
from ..artifact.manifest import Artifact, Origin
from ..backends import registry
from ..config import ExportConfig
from ..errors import ArtifactNotFoundError, PluginError
from ..interfaces.folder_reader import FolderReader
from ..interfaces.protocols import WeightsBackend
from ..interfaces.specs import WEIGHTS
from ..interfaces.task_registry import fitting_task, read_config


def holds_graphs(folder: Path) -> bool:
    """Whether a backend here reads graphs in the folder."""
    return registry.folder_reader(_files(folder)) is not None


def subfolder_of_graphs(folder: Path) -> str | None:
    """The first subfolder with graphs that a backend here reads, such as `openvino`."""
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir())
    return next(
        (path.name for path in subfolders if registry.folder_reader([one.name for one in path.iterdir()])), None
    )


def graphs_to_fetch(
    name: str, files: Sequence[str], *, file_name: str | None = None, variant: str | None = None
) -> list[str]:
    """The graphs among a repository's files that will be read; see `FolderReader.choose`."""
    if file_name is None and variant is None and registry.folder_reader(files) is None:
        return []
    reader = _reader(files, file_name)
    return [] if reader is None else reader.choose(name, files, file_name=file_name, variant=variant)


def adopt(
    folder: Path,
    subfolder: str = "",
    *,
    file_name: str | None = None,
    task: str | None = None,
    variant: str | None = None,
) -> Artifact:
    """An artifact for a folder of another tool. Graphs that have to be changed are written under `ACCEL_HOME`, once.

    Args:
        folder: The folder with the model's config.
        subfolder: The subfolder with the graphs, where one was named.
        file_name: The graph to take; of several that belong together, any of them.
        task: Its task; inferred from `config.json` when `None`.
        variant: The ending of the graphs' names, as transformers.js has it: `quantized`, `q4`, `fp16`, ...

    Raises:
        ArtifactNotFoundError: No such graph.
        IntegrityError: It cannot be read, or does not fit its config.
        BackendUnavailableError: What reads it is not installed.
    """
    graphs = folder / subfolder
    reader = _reader(_files(graphs), file_name)
    if reader is None:
        raise ArtifactNotFoundError(f"No backend here reads the graphs of {graphs}.", fix="run `accel doctor`.")
    name = fitting_task(task, read_config(folder)) if task else None
    progress.report("reading the graphs", 0, 1)
    artifact = reader.adopt(folder, task=name, subfolder=subfolder, file_name=file_name, variant=variant)
    progress.report("reading the graphs", 1, 1)
    return artifact


def adopt_weights(location: Location, *, task: str, config: ExportConfig, hub: HubOptions) -> Artifact:
    """The PyTorch weights of a transformers or adapter folder as an artifact that PyTorch runs; nothing is written.

    Raises:
        BackendUnavailableError: No backend here runs PyTorch models.
    """
    spec = registry.owner("export", WEIGHTS)
    backend = registry.load(spec)
    if not isinstance(backend, WeightsBackend):
        raise PluginError(f"The backend {spec.name!r} declares the format {WEIGHTS!r} and has no method `adopt`.")
    artifact = backend.adopt(location.folder, task=task, config=config, trust_remote_code=hub.trust_remote_code)
    source = Origin(id=location.id, revision=location.revision)
    return replace(artifact, manifest=replace(artifact.manifest, source=source))


def with_config(location: Location) -> tuple[Path, str]:
    """The folder with the model's config, and the subfolder of it that was named: `onnx` or `openvino`."""
    folder = location.folder
    for above in (location.root, folder.parent):
        has_config = above is not None and (above / "config.json").is_file()
        if above is not None and has_config and not (folder / "config.json").is_file():
            return above, folder.relative_to(above).as_posix()
    return folder, ""


def _reader(files: Sequence[str], file_name: str | None) -> FolderReader | None:
    named = registry.folder_reader([PurePosixPath(file_name).name]) if file_name is not None else None
    return named or registry.folder_reader(files) or registry.first_folder_reader()


def _files(folder: Path) -> list[str]:
    """Names of the files of a folder and of its subfolders, relative to it."""
    return [path.relative_to(folder).as_posix() for path in (*folder.glob("*"), *folder.glob("*/*"))]
