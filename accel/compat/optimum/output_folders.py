"""Write optimized and quantized graphs as Optimum does: to a folder that may contain other files, under new file names."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifact.atomic_folder_writing import copy_companions, copy_file, merging
from ...artifact.manifest import MANIFEST, MARK, Artifact, Component, with_files
from ...errors import ConfigError, OutputFolderError
from ...stages.resolution import resolve

if TYPE_CHECKING:
    import onnx_ir

_IN_ONE_FILE_BYTES = 1 << 30
"""Largest size of weights that are written into the graph file, as in Optimum. Larger weights are written to a separate file.

The limit of protobuf for one file is 2 GiB.
"""


def source_of(model: Any, file_name: str | None = None) -> Artifact:
    """Return the artifact of a loaded model, or of a folder with graphs.

    Raises:
        ArtifactNotFoundError: The graph does not exist.
        ConfigError: The graphs are not ONNX.
    """
    artifact = resolve(model, file_name=file_name, export=False).artifact
    assert artifact is not None, "export=False returns only existing graphs"
    if artifact.format != "onnx":
        raise ConfigError(
            f"The model in {artifact.path} has the format {artifact.format!r}, and this class needs an ONNX model.",
            fix="use OVQuantizer for an OpenVINO model, or call accel.optimize(...) or accel.quantize(...).",
        )
    return artifact


def place(artifact: Artifact, save_dir: str | os.PathLike[str], suffix: str | None) -> Path:
    """Copy an artifact to a folder, and add a suffix to the names of the graph files.

    If the folder already contains an artifact, the new graph is added without a manifest, and users load it with `file_name=`. Graphs of
    generating models need a manifest, so they are also written with their manifest to a subfolder.

    Raises:
        OutputFolderError: The folder contains another artifact, and there is no suffix that distinguishes the new graphs.
    """
    target = Path(save_dir).expanduser().absolute()
    named = {component.name: _named(component.file, suffix) for component in artifact.components}
    plain = len(artifact.components) == 1 and not artifact.components[0].stateful
    single_file = len(artifact.components) == 1 and artifact.bytes < _IN_ONE_FILE_BYTES
    graphs = _graphs_in(target)
    if not graphs or graphs == set(named.values()):
        _write_artifact(artifact, target, named, single_file=single_file, marked=not plain)
    elif plain:
        copy_companions(artifact.path, target)
        _write_graphs(artifact, target, named, single_file=single_file, marked=False)
    elif not suffix:
        raise OutputFolderError(
            f"The folder {target} already contains another model ({', '.join(sorted(graphs))}).",
            fix="pass file_suffix=... to write the new files under other names, or pass another folder as save_dir.",
        )
    else:
        inner = target / suffix
        _write_artifact(artifact, inner, named, single_file=single_file, marked=True)
        for path in inner.glob("*.onnx*"):
            copy_file(path, target / path.name)
    return target


def _write_artifact(
    artifact: Artifact, target: Path, named: dict[str, str], *, single_file: bool, marked: bool
) -> None:
    with merging(target) as folder:
        copy_companions(artifact.path, folder)
        names = _write_graphs(artifact, folder, named, single_file=single_file, marked=marked)
        components = tuple(replace(component, file=named[component.name]) for component in artifact.components)
        manifest = replace(artifact.manifest, components=with_files(folder, components, names))
        Artifact.create(folder, manifest, companions=False)


def _named(file: str, suffix: str | None) -> str:
    path = Path(file)
    return str(path.with_name(f"{path.stem}_{suffix}{path.suffix}")) if suffix else file


def _graphs_in(folder: Path) -> set[str]:
    """Return the names of the graph files of the artifact in a folder. Empty if the folder contains no artifact."""
    if not (folder / MANIFEST).is_file():
        return set()
    return {component.file for component in Artifact.load(folder).components}


def _write_graphs(
    artifact: Artifact, folder: Path, named: dict[str, str], *, single_file: bool, marked: bool
) -> list[list[str]]:
    """Write all graphs under their new names, and return the list of files of each graph."""
    data: dict[str, str] = {}
    written = []
    for component in artifact.components:
        graph = named[component.name]
        for record in component.files:
            if record.name != component.file and record.name not in data:
                data[record.name] = f"{graph}_data" if not single_file else ""
                if not single_file:
                    shutil.copyfile(artifact.path / record.name, folder / data[record.name])
        _write_graph(artifact, component, folder / graph, data, single_file=single_file, marked=marked)
        others = [data[record.name] for record in component.files if record.name != component.file]
        written.append([graph, *(name for name in others if name)])
    return written


def _write_graph(
    artifact: Artifact, component: Component, path: Path, data: dict[str, str], *, single_file: bool, marked: bool
) -> None:
    """Write one graph. If `single_file` is True, it contains its weights. If not, it refers to copies of the weight files."""
    import onnx_ir

    model = onnx_ir.load(artifact.path / component.file)
    if not marked:
        model.metadata_props.pop(MARK, None)
    if single_file:
        onnx_ir.external_data.load_to_model(model)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, onnx_ir.ExternalTensor):
            location = Path(data[str(Path(component.file).parent / tensor.location)]).name
            value.const_value = onnx_ir.ExternalTensor(
                location,
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=tensor.shape,
                name=tensor.name,
                base_dir=path.parent,
            )
    onnx_ir.save(model, path)


def nodes_of(graph: str | os.PathLike[str]) -> list[onnx_ir.Node]:
    """Return the nodes of an ONNX file. External weight files are not read."""
    import onnx_ir

    return list(onnx_ir.load(graph).graph)


def without_mark(artifact: Artifact) -> Artifact:
    """Remove accel's mark from an OpenVINO graph, so that the graph can also be loaded without the manifest. Return the artifact.

    An artifact with several graphs or with a state is returned unchanged, because it needs its manifest.
    """
    from xml.etree import ElementTree as ET

    component = artifact.components[0]
    if len(artifact.components) != 1 or component.stateful:
        return artifact
    path = artifact.path / component.file
    tree = ET.parse(path)
    facts = tree.getroot().find("rt_info")
    mark = facts.find(MARK.partition(".")[0]) if facts is not None else None
    if facts is None or mark is None:
        return artifact
    facts.remove(mark)
    tree.write(path, xml_declaration=True, encoding="utf-8")
    names = [[record.name for record in component.files]]
    return Artifact.create(
        artifact.path, replace(artifact.manifest, components=with_files(artifact.path, artifact.components, names))
    )
