"""Reading the graphs of an ONNX artifact and writing the artifact that a stage made of them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from accel.artifact import (
    Artifact,
    Component,
    Quantization,
    Step,
    copy_companions,
    record_files,
)

MICROSOFT = "com.microsoft"
_EXPORT_MANIFEST = "export.json"


def load_graphs(artifact: Artifact) -> dict[str, ir.Model]:
    """The graphs by component name; weights stay on disk until they are read."""
    return {component.name: load_graph(artifact, component) for component in artifact.components}


def load_graph(artifact: Artifact, component: Component) -> ir.Model:
    """One graph; weights stay on disk until they are read."""
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)
    return ir.load(artifact.path / component.file)


def save_graph(model: ir.Model, path: Path) -> None:
    """Write a graph, with its weights in `<name>.data` beside it; an existing file is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    used = {node.domain for graph in model.graphs() for node in graph} | {""}
    if MICROSOFT in used:
        model.opset_imports.setdefault(MICROSOFT, 1)
    ir.save(model, path, external_data=f"{path.name}.data")


def write_artifact(
    parent: Artifact,
    models: Mapping[str, ir.Model],
    out: Path,
    *,
    step: Step,
    dtype: str | None = None,
    quantization: Quantization | None = None,
) -> Artifact:
    """Write the graphs, copy what travels with a model, and extend the parent's manifest by a step.

    Component specs stay the parent's: a stage never changes what goes in and out.
    """
    components = []
    for component in parent.components:
        file = out / component.file
        save_graph(models[component.name], file)
        names = [component.file]
        if file.with_name(f"{file.name}.data").exists():
            names.append(f"{component.file}.data")
        components.append(replace(component, files=record_files(out, names)))
    copy_companions(parent.path, out)
    if (parent.path / _EXPORT_MANIFEST).is_file():
        shutil.copyfile(parent.path / _EXPORT_MANIFEST, out / _EXPORT_MANIFEST)
    opsets = [model.opset_imports.get("") for model in models.values()]
    manifest = replace(
        parent.manifest,
        components=tuple(components),
        steps=(*parent.manifest.steps, replace(step, parent=parent.digest)),
        dtype=dtype or parent.manifest.dtype,
        opset=opsets[0] if opsets else parent.manifest.opset,
        quantization=quantization or parent.manifest.quantization,
        # How the parent ran best says nothing about the new graph.
        run=None,
    )
    return Artifact.create(out, manifest)


def nodes(model: ir.Model, *operators: str, domain: str = "") -> Iterator[ir.Node]:
    """Nodes of these operators in the graph and its subgraphs, listed up front so that the graph may change."""
    found = [node for graph in model.graphs() for node in graph if node.op_type in operators and node.domain == domain]
    for node in found:
        if node.graph is not None:
            yield node


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The value as an array when it is a constant: an initializer or a `Constant` node's."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def scalar(value: ir.Value | None) -> float | None:
    """The value as a number when it is a constant of one element."""
    if value is None or (value.shape is not None and value.shape.rank() > 1):
        return None
    array = constant(value)
    return float(array.reshape(())) if array is not None and array.size == 1 else None


def add_initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """A new constant of the graph, under a name that nothing else has."""
    unique, n = name, 1
    while unique in graph.initializers:
        unique, n = f"{name}_{n}", n + 1
    tensor = ir.tensor(np.ascontiguousarray(array), name=unique)
    value = ir.Value(name=unique, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
    graph.register_initializer(value)
    return value


def root_graph(node: ir.Node) -> ir.Graph:
    """The graph that a node is in; constants are registered there."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    return graph


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Everything that reads `old` reads `new`; a graph output keeps its name, type and shape."""
    if new.shape is None:
        new.shape = old.shape
    if new.type is None:
        new.type = old.type
    if old.is_graph_output():
        name = old.name
        new.shape, new.type = old.shape, old.type
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = f"{name}_replaced", name
    else:
        old.replace_all_uses_with(new)


def layer_name(node: ir.Node) -> str:
    """The module that a product belongs to, from the names of its bias or weight; the node's name where they say nothing."""
    candidates: list[ir.Value | None] = list(node.inputs[1:])
    for use in node.outputs[0].uses():
        if use.node.op_type == "Add":
            candidates += use.node.inputs
    for suffix in (".bias", ".weight"):
        for value in candidates:
            if value is not None and value.is_initializer() and str(value.name).endswith(suffix):
                return str(value.name).removesuffix(suffix)
    return str(node.name)
