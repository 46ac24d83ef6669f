"""Where Optimum's stages write: into a folder that exists, beside other files, under a name of their own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...artifact.manifest import MANIFEST, MARK, Artifact, Component, with_files
from ...artifact.writing import copy_companions, merging
from ...errors import ConfigError, OutputFolderError
from ...stages.resolving import resolve

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

    Where the folder holds an artifact already, the graph is put beside it, to be named by `file_name=`.

    Raises:
        OutputFolderError: It holds another artifact, and these graphs do not say themselves what goes in and out of them.
    """
    target = Path(save_dir).expanduser().absolute()
    named = {component.name: _named(component.file, suffix) for component in made.components}
    plain = len(made.components) == 1 and not made.components[0].stateful
    there = _graphs_in(target)
    beside = bool(there) and there != set(named.values())
    if beside and not plain:
        raise OutputFolderError(
            f"{target} holds another artifact ({', '.join(sorted(there))}), and graphs of a model that generates need a "
            "manifest of their own.",
            fix="name another folder as save_dir.",
        )
    whole = plain and made.bytes < _IN_ONE_FILE_BYTES
    with merging(target) if not beside else _inside(target) as folder:
        copy_companions(made.path, folder)
        names = _write_graphs(made, folder, named, whole=whole, marked=not plain)
        if not beside:
            components = tuple(replace(one, file=named[one.name]) for one in made.components)
            manifest = replace(made.manifest, components=with_files(folder, components, names))
            Artifact.create(folder, manifest, companions=False)
    return target


class _inside:  # noqa: N801  # a context manager
    """A folder as it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Path:
        return self._folder

    def __exit__(self, *_: object) -> None:
        pass


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
    import shutil

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
