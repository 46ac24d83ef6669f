"""Create artifacts from folders without a manifest of accel. The folders contain graphs of other tools or PyTorch weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from .. import progress
from ..artifact.hub import Location
from ..artifact.manifest import Artifact, Origin
from ..artifact.resolved_model import ResolvedModel
from ..artifact.signatures import check_required
from ..backends import registry
from ..backends.stage_backend_selection import plan_stage
from ..config import ExportConfig
from ..errors import ArtifactNotFoundError, PluginError
from ..interfaces.folder_reader import FolderReader
from ..interfaces.protocols import WeightsBackend
from ..interfaces.specs import WEIGHTS
from ..interfaces.task_registry import fitting_task, read_config


def holds_graphs(folder: Path) -> bool:
    """Return whether an installed backend can read graphs in the folder."""
    return registry.folder_reader(_names_within(folder)) is not None


def subfolder_of_graphs(folder: Path) -> str | None:
    """Return the name of the first subfolder with graphs that an installed backend can read, such as `openvino`."""
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir())
    return next(
        (path.name for path in subfolders if registry.folder_reader([file.name for file in path.iterdir()])), None
    )


def graphs_to_fetch(
    name: str, files: Sequence[str], *, file_name: str | None = None, variant: str | None = None
) -> list[str]:
    """Return the graph files to download from a repository. The backend chooses them with `FolderReader.choose`."""
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
    """Return an artifact for a folder that another tool exported. If the graphs must be changed, changed copies of them are
    stored in `ACCEL_HOME`.

    Args:
        folder: The folder with the model's config.
        subfolder: The subfolder with the graphs, if the user named one.
        file_name: The graph to open. If several graphs belong together, any one of them.
        task: The task of the model; inferred from `config.json` when `None`.
        variant: Suffix of the graph names, as in transformers.js: `quantized`, `q4`, `fp16`, ...

    Raises:
        ArtifactNotFoundError: There is no such graph.
        IntegrityError: The graph cannot be read, or does not match its config.
        BackendUnavailableError: The library that reads the graph is not installed.
    """
    graphs = folder / subfolder
    reader = _reader(_names_within(graphs), file_name)
    if reader is None:
        raise ArtifactNotFoundError(
            f"No installed backend can read the graphs in {graphs}.", fix="run `accel doctor` to see the backends."
        )
    check_required(folder)
    name = fitting_task(task, read_config(folder)) if task else None
    progress.report("reading the graphs", 0, 1)
    artifact = reader.adopt(folder, task=name, subfolder=subfolder, file_name=file_name, variant=variant)
    progress.report("reading the graphs", 1, 1)
    return artifact


def weights_of(resolved: ResolvedModel, config: ExportConfig | None = None) -> Artifact:
    """Return an artifact for the PyTorch weights of a transformers or adapter folder. The artifact runs with PyTorch, and no
    file is written.

    Raises:
        BackendUnavailableError: No installed backend runs PyTorch models.
    """
    spec = plan_stage("export", WEIGHTS).backend
    backend = registry.load(spec)
    if not isinstance(backend, WeightsBackend):
        raise PluginError(
            f"The backend {spec.name!r} declares the format {WEIGHTS!r}, but its implementation has no method `adopt`."
        )
    location, trust = resolved.location, resolved.hub.trust_remote_code
    check_required(location.folder)
    artifact = backend.adopt(
        location.folder, task=resolved.task, config=config or ExportConfig(), trust_remote_code=trust
    )
    source = Origin(id=location.id, revision=location.revision)
    return replace(artifact, manifest=replace(artifact.manifest, source=source))


def with_config(location: Location) -> tuple[Path, str]:
    """Return the folder with the model's config, and the subfolder with its graphs (`onnx` or `openvino`; empty if it
    is the same folder).
    """
    folder = location.folder
    for above in (location.root, folder.parent):
        has_config = above is not None and (above / "config.json").is_file()
        if above is not None and has_config and not (folder / "config.json").is_file():
            return above, folder.relative_to(above).as_posix()
    return folder, ""


def _names_within(folder: Path) -> list[str]:
    """Return the names of all files and folders in the folder and its direct subfolders.

    Folders are listed as well, so that a folder named `model.onnx` gives an error instead of being ignored.
    """
    return [path.relative_to(folder).as_posix() for path in (*folder.glob("*"), *folder.glob("*/*"))]


def _reader(files: Sequence[str], file_name: str | None) -> FolderReader | None:
    named = registry.folder_reader([PurePosixPath(file_name).name]) if file_name is not None else None
    return named or registry.folder_reader(files) or registry.first_folder_reader()
