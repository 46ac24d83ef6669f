"""Where Optimum's stages write: into a folder that exists, beside other files, under a name of their own."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...artifact.manifest import MANIFEST, MARK, Artifact, Component, with_files
from ...artifact.writing import copy_companions, copy_file, merging
from ...errors import ConfigError, OutputFolderError
from ...stages.resolution import resolve

_IN_ONE_FILE_BYTES = 1 << 30
"""Up to here weights go into the graph's file, as Optimum has it: protobuf's own limit is twice that."""


def source_of(model: Any, file_name: str | None = None) -> Artifact:
    """The artifact of an open model, or of a folder with graphs.

    Raises:
        ArtifactNotFoundError: There is no such graph.
        ConfigError: Graphs of another runtime.
    """
    artifact = resolve(model, file_name=file_name, export=False).artifact
    assert artifact is not None, "export=False finds graphs alone"
    if artifact.format != "onnx":
        raise ConfigError(
            f"{artifact.path} holds {artifact.format}, not ONNX.", fix="use OVQuantizer, or accel.quantize(...)."
        )
    return artifact


def place(made: Artifact, save_dir: str | os.PathLike[str], suffix: str | None) -> Path:
    """Copy an artifact into a folder, its graphs under names with a suffix.

    Where the folder holds an artifact already, the graph is put beside it, to be named by `file_name=`. Graphs of a model that
    generates do not say themselves what goes in and out of them: they get a subfolder with a manifest, too.

    Raises:
        OutputFolderError: It holds another artifact, and there is no suffix to tell them apart.
    """
    target = Path(save_dir).expanduser().absolute()
    named = {component.name: _named(component.file, suffix) for component in made.components}
    plain = len(made.components) == 1 and not made.components[0].stateful
    whole = len(made.components) == 1 and made.bytes < _IN_ONE_FILE_BYTES
    there = _graphs_in(target)
    if not there or there == set(named.values()):
        _write_artifact(made, target, named, whole=whole, marked=not plain)
    elif plain:
        copy_companions(made.path, target)
        _write_graphs(made, target, named, whole=whole, marked=False)
    elif not suffix:
        raise OutputFolderError(
            f"{target} holds another artifact ({', '.join(sorted(there))}).",
            fix="pass file_suffix=..., or another folder as save_dir.",
        )
    else:
        inner = target / suffix
        _write_artifact(made, inner, named, whole=whole, marked=True)
        for path in inner.glob("*.onnx*"):
            copy_file(path, target / path.name)
    return target


def _write_artifact(made: Artifact, target: Path, named: dict[str, str], *, whole: bool, marked: bool) -> None:
    with merging(target) as folder:
        copy_companions(made.path, folder)
        names = _write_graphs(made, folder, named, whole=whole, marked=marked)
        components = tuple(replace(one, file=named[one.name]) for one in made.components)
        manifest = replace(made.manifest, components=with_files(folder, components, names))
        Artifact.create(folder, manifest, companions=False)


def _named(file: str, suffix: str | None) -> str:
    path = Path(file)
    return str(path.with_name(f"{path.stem}_{suffix}{path.suffix}")) if suffix else file


def _graphs_in(folder: Path) -> set[str]:
    """Graph files of the artifact that a folder holds; none where it holds none."""
    if not (folder / MANIFEST).is_file():
        return set()
    return {component.file for component in Artifact.load(folder).components}


def _write_graphs(made: Artifact, folder: Path, named: dict[str, str], *, whole: bool, marked: bool) -> list[list[str]]:
    """The graphs under their new names; returns the files of each."""
    data: dict[str, str] = {}
    written = []
    for component in made.components:
        graph = named[component.name]
        for record in component.files:
            if record.name != component.file and record.name not in data:
                data[record.name] = f"{graph}_data" if not whole else ""
                if not whole:
                    shutil.copyfile(made.path / record.name, folder / data[record.name])
        _write_graph(made, component, folder / graph, data, whole=whole, marked=marked)
        others = [data[record.name] for record in component.files if record.name != component.file]
        written.append([graph, *(name for name in others if name)])
    return written


def _write_graph(
    made: Artifact, component: Component, path: Path, data: dict[str, str], *, whole: bool, marked: bool
) -> None:
    import onnx

    source = made.path / component.file
    model = onnx.load(str(source), load_external_data=whole)
    if not marked:
        kept = [entry for entry in model.metadata_props if entry.key != MARK]
        del model.metadata_props[:]
        model.metadata_props.extend(kept)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = Path(data[str(Path(component.file).parent / entry.value)]).name
    onnx.save(model, str(path))


def without_mark(made: Artifact) -> Artifact:
    """An OpenVINO artifact whose one graph loads without its manifest too, as optimum-intel's do: files of it are renamed."""
    from xml.etree import ElementTree as ET

    component = made.components[0]
    if len(made.components) != 1 or component.stateful:
        return made
    path = made.path / component.file
    tree = ET.parse(path)
    facts = tree.getroot().find("rt_info")
    mark = facts.find(MARK.partition(".")[0]) if facts is not None else None
    if facts is None or mark is None:
        return made
    facts.remove(mark)
    tree.write(path, xml_declaration=True, encoding="utf-8")
    names = [[record.name for record in component.files]]
    return Artifact.create(made.path, replace(made.manifest, components=with_files(made.path, made.components, names)))
