"""Folders without our manifest: Optimum's, transformers.js', onnx-community's, optimum-intel's, transformers' own exports,
onnxruntime-genai's, or a lone ONNX file.

`files` says which graphs of a folder are meant, `reading` what stands in one of them; `plain` makes an artifact of one graph
where it lies, `decoders` of those that generate, which `surgery` and `attention` bring to our form, `weights` writes and
`ACCEL_HOME` keeps; `descriptions` reads other tools' own manifests. Formats that a backend owns (OpenVINO's) that backend adopts. A new
layout of ONNX files is a row in `files`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...artifact.hub import HubOptions, Location
from ...artifact.manifest import Artifact, Origin
from ...backends import registry
from ...config import ExportConfig
from ...errors import ArtifactNotFoundError, PluginError
from ...interfaces.specs import WEIGHTS, BackendSpec
from ...interfaces.task_registry import fitting_task
from .descriptions import describe
from .files import GENAI, beside_config, descriptions_in, graph_files
from .plain import adopt_onnx

__all__ = [
    "adopt",
    "adopt_onnx",
    "adopt_weights",
    "beside_config",
    "graph_files",
    "holds_graphs",
    "subfolder_of_graphs",
]


def holds_graphs(folder: Path) -> bool:
    """Whether a folder holds graphs that something here reads, as opposed to PyTorch weights alone."""
    return (
        bool(descriptions_in(folder))
        or bool(graph_files(folder))
        or registry.backend_for_layout([p.name for p in folder.iterdir()]) is not None
    )


def subfolder_of_graphs(folder: Path) -> str | None:
    """The subfolder that holds graphs in a format that its backend reads (`openvino`), where the folder itself holds none."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and registry.backend_for_layout([one.name for one in path.iterdir()]) is not None:
            return path.name
    return None


def adopt(
    folder: Path, *, file_name: str | None, task: str | None, hub: HubOptions, variant: str | None = None
) -> Artifact:
    """An artifact for a folder of another tool. Graphs that are to be brought to our form are kept under `ACCEL_HOME`, once.

    Args:
        folder: The folder.
        file_name: The graph to take from an ONNX folder; of several that belong together, one of them.
        task: Its task; inferred from `config.json` when `None`.
        hub: Whether code that comes with the model may run.
        variant: The ending of the graphs to take, as transformers.js has it: `quantized`, `q4`, `fp16`, ...

    Raises:
        ArtifactNotFoundError: No such graph.
        IntegrityError: It cannot be read, or does not fit its config.
    """
    # A folder of graphs in a subfolder has its config above.
    place = folder if (folder / "config.json").is_file() or file_name is not None else _with_config(folder)
    description = describe(place)
    chosen = fitting_task(task, description.config) if task else description.task(place)
    if file_name is not None and registry.backend_for_layout([Path(file_name).name]) is not None:
        spec, named = registry.backend_for_layout([Path(file_name).name]), folder / file_name
    else:
        spec, named = registry.backend_for_layout([p.name for p in folder.iterdir()]), folder
    if spec is None or named.suffix == ".onnx" or (named == folder and (file_name is not None or graph_files(folder))):
        return adopt_onnx(folder, file_name=file_name, task=chosen, variant=variant)
    if variant is not None:
        raise ArtifactNotFoundError(
            f"{folder} holds no ONNX graphs, which variants are of.", fix="leave variant=... out."
        )
    return _adopted_by(spec, named, chosen, ExportConfig(), hub)


def _with_config(folder: Path) -> Path:
    above = folder.parent
    return above if not (folder / GENAI).is_file() and (above / "config.json").is_file() else folder


def adopt_weights(location: Location, *, task: str, config: ExportConfig, hub: HubOptions) -> Artifact:
    """The PyTorch weights of a transformers or adapter folder as an artifact that PyTorch runs; nothing is written.

    Raises:
        BackendUnavailableError: No backend here runs PyTorch models.
    """
    made = _adopted_by(registry.owner("export", WEIGHTS), location.folder, task, config, hub)
    source = Origin(id=location.id, revision=location.revision)
    return replace(made, manifest=replace(made.manifest, source=source))


def _adopted_by(spec: BackendSpec, folder: Path, task: str, config: ExportConfig, hub: HubOptions) -> Artifact:
    backend = registry.load(spec)
    made = backend.adopt(folder, task=task, config=config, trust_remote_code=hub.trust_remote_code)
    if made is None:
        raise PluginError(f"The backend {spec.name!r} declares folders like {folder} and adopts none.")
    return made
