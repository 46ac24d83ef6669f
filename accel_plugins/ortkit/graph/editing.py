"""Reading the graphs of an ONNX artifact and writing the artifact that a stage made of them."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.artifact import (
    MANIFEST,
    MARK,
    Artifact,
    Component,
    Quantization,
    Step,
    TensorSpec,
    copy_companions,
    with_files,
)
from accel.artifact.checksums import is_inside
from accel.errors import IntegrityError

MICROSOFT = "com.microsoft"
INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)
"""Types of token ids, masks and positions."""
SHARED_WEIGHTS = "model.onnx.data"
_EXPORT_MANIFEST = "export.json"
_CACHE_TYPES: Mapping[ir.DataType | None, str] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}
INLINE_BYTES = 256
"""Smaller weights are in the graph itself."""
# Runtimes map large weights from the file, page by page; small ones only need their elements aligned.
_PAGE_BYTES = 4096
_LARGE_BYTES = 1 << 20
_ELEMENT_BYTES = 16


def load_graphs(artifact: Artifact) -> dict[str, ir.Model]:
    """The graphs by component name; weights stay on disk until they are read."""
    return {component.name: load_graph(artifact, component) for component in artifact.components}


def load_graph(artifact: Artifact, component: Component) -> ir.Model:
    """One graph; weights stay on disk until they are read."""
    return read_graph(artifact.path / component.file)


def read_graph(path: Path, proto: onnx.ModelProto | None = None) -> ir.Model:
    """The graph of a file; weights stay on disk until they are read, but for those in attributes of nodes.

    Their files are in the folder of `path.resolve()`.

    Args:
        path: The file.
        proto: What was read from it, without its external data.

    Raises:
        IntegrityError: It cannot be read.
    """
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)
    try:
        model = ir.from_proto(proto or onnx.load(path, load_external_data=False))
        ir.external_data.set_base_dir(model.graph, path.parent)
        for inner in model.graphs():
            for value in inner.initializers.values():
                if isinstance(value.const_value, ir.ExternalTensor):
                    value.const_value = _behind_link(value.const_value, path)
        for graph in (model.graph, *model.functions.values()):
            for node in ir.traversal.RecursiveGraphIterator(graph):
                for name, attribute in node.attributes.items():
                    if isinstance(attribute.value, ir.ExternalTensor):
                        attribute.value.base_dir = path.parent
                        tensor = _behind_link(attribute.value, path)
                        node.attributes[name] = ir.AttrTensor(name, _in_memory(tensor))
    # onnx_ir says of damaged graphs what protobuf, NumPy and its own classes say.
    except Exception as error:
        raise IntegrityError(
            f"{path} cannot be read as ONNX: {error}.", fix="copy or export the file again."
        ) from error
    return model


def _behind_link(tensor: ir.ExternalTensor, graph: Path) -> ir.ExternalTensor:
    """A weight by the file that its link leads to, next to the one that the graph's leads to.

    In a Hub snapshot each file is a link to one of another name in another folder; onnx_ir and ONNX Runtime refuse such weights.
    """
    file = graph.parent / tensor.location
    real = file.resolve()
    if real == file.absolute() or real.parent != graph.resolve().parent or not is_inside(file, graph.parent):
        return tensor
    return ir.ExternalTensor(
        real.name,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name or "",
        base_dir=real.parent,
    )


def _in_memory(tensor: ir.ExternalTensor) -> ir.Tensor:
    """A weight that lies in a file, read."""
    return ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)


def save_graphs(models: Mapping[str, ir.Model], folder: Path) -> tuple[str, ...]:
    """Write graphs by file name, with the weights of all of them in one file beside them, each weight once.

    Weights with the same bytes are stored once: layers that share a weight, embeddings that are also the last layer, tables
    that an encoder's and a decoder's file both hold.

    Returns:
        The files beside the graphs.
    """
    for model in models.values():
        if len(list(model.graphs())) > 1:
            # New nodes were named by the graph that they are in; a name is used once, there and in the graphs around it.
            passes.NameFixPass()(model)
    first = Path(next(iter(models)))
    weights = first.with_name(f"{first.name}.data" if len(models) == 1 else SHARED_WEIGHTS)
    base = (folder / weights).parent
    base.mkdir(parents=True, exist_ok=True)
    offsets: dict[object, tuple[int, int]] = {}
    places: dict[bytes, tuple[int, int]] = {}
    replaced: list[tuple[ir.Value, Any]] = []
    with (folder / weights).open("wb") as file:
        for model in models.values():
            for graph in model.graphs():
                for value in graph.initializers.values():
                    tensor = value.const_value
                    if tensor is None or tensor.nbytes < INLINE_BYTES or tensor.dtype == ir.DataType.STRING:
                        if isinstance(tensor, ir.ExternalTensor):
                            # Other tools put small ones beside their graphs, too.
                            value.const_value = _in_memory(tensor)
                        continue
                    key = identity(tensor)
                    if key not in offsets:
                        digest = content(tensor)
                        if digest not in places:
                            alignment = _PAGE_BYTES if tensor.nbytes >= _LARGE_BYTES else _ELEMENT_BYTES
                            file.write(b"\0" * (-file.tell() % alignment))
                            places[digest] = (file.tell(), tensor.nbytes)
                            if hasattr(tensor, "tofile"):
                                tensor.tofile(file)
                            else:
                                file.write(tensor.tobytes())
                        offsets[key] = places[digest]
                    replaced.append((value, tensor))
    for value, tensor in replaced:
        offset, length = offsets[identity(tensor)]
        value.const_value = ir.ExternalTensor(
            weights.name, offset, length, tensor.dtype, shape=tensor.shape, name=str(value.name), base_dir=base
        )
    try:
        for name, model in models.items():
            if MICROSOFT in operator_domains(model):
                model.opset_imports.setdefault(MICROSOFT, 1)
            model.metadata_props[MARK] = MANIFEST
            write_graph(model, folder / name)
    finally:
        # The caller's graphs keep their weights, which may be in memory or elsewhere.
        for value, tensor in replaced:
            value.const_value = tensor
    if not offsets:
        (folder / weights).unlink()
    return (str(weights),) if offsets else ()


def merge_initializers(model: ir.Model) -> None:
    """Let layers that share a weight in memory share an initializer; nothing is read.

    The exporter's optimizer transposes a weight once for each layer that uses it.
    """
    for graph in model.graphs():
        first: dict[object, ir.Value] = {}
        for name, value in list(graph.initializers.items()):
            if value.const_value is None or value.is_graph_input() or value.is_graph_output():
                continue
            kept = first.setdefault((identity(value.const_value), str(value.shape)), value)
            if kept is not value:
                value.replace_all_uses_with(kept)
                del graph.initializers[name]


def save_graph(model: ir.Model, path: Path) -> None:
    """Write one graph, with its weights in `<name>.data` beside it."""
    save_graphs({path.name: model}, path.parent)


def write_graph(model: ir.Model, path: Path) -> None:
    """Write a graph as it is, without `value_info` of its initializers.

    The initializers have types and shapes of their own; ONNX Runtime's `quantize_dynamic` transposes some, and fails on a second
    record of the shape.
    """
    stored = [v for graph in model.graphs() for v in graph.initializers.values() if not v.is_graph_input()]
    described = [(value, value.type, value.shape) for value in stored]
    for value in stored:
        value.type = value.shape = None
    try:
        path.write_bytes(ir.to_proto(model).SerializeToString())
    finally:
        for value, kind, shape in described:
            value.type, value.shape = kind, shape


def content(tensor: Any) -> bytes:
    """Digest of a weight's bytes, 32 bytes. Takes about a second for two gigabytes."""
    if tensor.dtype.bitwidth < 8:
        return hashlib.sha256(tensor.tobytes()).digest()
    return hashlib.sha256(np.ascontiguousarray(tensor.numpy()).view(np.uint8).data).digest()


def identity(tensor: Any) -> object:
    """A key that is equal for weights in the same memory, or at the same place of a file, while they are alive."""
    if isinstance(tensor, ir.ExternalTensor):
        return str(tensor.path), tensor.offset, tensor.length
    raw: Any = getattr(tensor, "raw", None)
    if isinstance(raw, np.ndarray):
        return raw.__array_interface__["data"][0], raw.shape, raw.strides, str(tensor.dtype)
    if hasattr(raw, "data_ptr"):
        return raw.data_ptr(), tuple(raw.shape), tuple(raw.stride()), str(tensor.dtype)
    return id(tensor)


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

    Component specs stay the parent's: a stage never changes what goes in and out. Only the types of cache buffers, which
    no caller sees, and the domains of operators are those of the graphs.
    """
    parent = _as_in_graphs(parent, models)
    beside = save_graphs({component.file: models[component.name] for component in parent.components}, out)
    components = with_files(out, parent.components, [[component.file, *beside] for component in parent.components])
    copy_companions(parent.path, out)
    if (parent.path / _EXPORT_MANIFEST).is_file():
        shutil.copyfile(parent.path / _EXPORT_MANIFEST, out / _EXPORT_MANIFEST)
    opsets = [model.opset_imports.get("") for model in models.values()]
    manifest = replace(
        parent.manifest,
        components=components,
        steps=(*parent.manifest.steps, replace(step, parent=parent.digest)),
        dtype=dtype or parent.manifest.dtype,
        opset=opsets[0] if opsets else parent.manifest.opset,
        quantization=quantization or parent.manifest.quantization,
        # How the parent ran best says nothing about the new graph.
        run=None,
    )
    return Artifact.create(out, manifest)


def _as_in_graphs(artifact: Artifact, models: Mapping[str, ir.Model]) -> Artifact:
    """The artifact with the graphs' operator domains, and types of the inputs and outputs that hold a KV cache."""

    def typed(spec: TensorSpec, kinds: Mapping[str | None, ir.DataType | None]) -> TensorSpec:
        return spec if spec.pair is None else replace(spec, dtype=_CACHE_TYPES.get(kinds.get(spec.name), spec.dtype))

    components = []
    for component in artifact.components:
        graph = models[component.name].graph
        kinds = {value.name: value.dtype for value in (*graph.inputs, *graph.outputs)}
        inputs = tuple(typed(spec, kinds) for spec in component.inputs)
        outputs = tuple(typed(spec, kinds) for spec in component.outputs)
        domains = operator_domains(models[component.name])
        components.append(replace(component, inputs=inputs, outputs=outputs, domains=domains))
    return Artifact(artifact.path, replace(artifact.manifest, components=tuple(components)))


def operator_domains(model: ir.Model) -> tuple[str, ...]:
    """Domains of the operators that a graph uses, sorted; functions that the file itself defines count by what they use."""
    own = {(key[0], key[1]) for key in model.functions}
    inside = [node for function in model.functions.values() for node in function.all_nodes()]
    used = [*(node for graph in model.graphs() for node in graph), *inside]
    return tuple(
        sorted(
            {"" if node.domain == "ai.onnx" else node.domain for node in used if (node.domain, node.op_type) not in own}
        )
    )


def nodes(model: ir.Model, *operators: str, domain: str = "") -> Iterator[ir.Node]:
    """Nodes of these operators in the graph and its subgraphs, listed up front so that the graph may change."""
    found = [node for graph in model.graphs() for node in graph if node.op_type in operators and node.domain == domain]
    for node in found:
        if node.graph is not None:
            yield node


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The value as an array of its own shape when it is a constant: an initializer or a `Constant` node's."""
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
    """A new constant of the graph, with the array's shape and type, under a name that nothing else has."""
    unique, n = name, 1
    while unique in graph.initializers:
        unique, n = f"{name}_{n}", n + 1
    # Unlike `ascontiguousarray`, this keeps numbers without axes.
    tensor = ir.tensor(np.asarray(array, order="C"), name=unique)
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


def replace_node(old: ir.Node, new: ir.Node) -> None:
    """Put one node in another's place, with its type and shape; what only the old one read is left to be removed later."""
    graph = root_graph(old)
    graph.insert_before(old, new)
    new.outputs[0].type, new.outputs[0].shape = old.outputs[0].type, old.outputs[0].shape
    replace_value(old.outputs[0], new.outputs[0])
    graph.remove(old, safe=True)


def insert_after(value: ir.Value, graph: ir.Graph, made: Sequence[ir.Node]) -> None:
    """Put nodes where a value is known: behind the node that makes it, or at the front for inputs, constants and what comes
    from an outer graph.
    """
    maker = value.producer()
    if maker is not None and maker.graph is graph:
        graph.insert_after(maker, made)
    elif len(graph):
        graph.insert_before(graph[0], made)
    else:
        graph.extend(made)


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
