"""Functions that read the graphs of an ONNX artifact, edit them, and write the artifact that a stage produces."""

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
from accel.capture import MODULE
from accel.errors import IntegrityError

from .checkpoint_tensors import CheckpointTensor

MICROSOFT = "com.microsoft"
INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)
"""Data types of token ids, masks and position ids."""
COPY_AGAIN = "copy the file again from the original folder, or export the model again."
"""Remedy for damaged graph files."""
SHARED_WEIGHTS = "model.onnx.data"
_EXPORT_MANIFEST = "export.json"
_CACHE_TYPES: Mapping[ir.DataType | None, str] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}
INLINE_BYTES = 256
"""Weights with fewer bytes are stored in the graph file."""
# Large weights start at a page boundary, because runtimes memory-map files page by page. Small weights start at a
# multiple of the element size.
_PAGE_BYTES = 4096
_LARGE_BYTES = 1 << 20
_ELEMENT_BYTES = 16


def load_graphs(artifact: Artifact) -> dict[str, ir.Model]:
    """Return the graphs by component name; weights stay on disk until they are read."""
    return {component.name: load_graph(artifact, component) for component in artifact.components}


def load_graph(artifact: Artifact, component: Component) -> ir.Model:
    """Return the graph of one component; weights stay on disk until they are read."""
    return read_graph(artifact.path / component.file)


def read_graph(path: Path, proto: onnx.ModelProto | None = None) -> ir.Model:
    """Return the graph in a file; initializers stay on disk until they are read.

    Weights in node attributes are loaded immediately.

    The weight files are in the folder of `path.resolve()`.

    Args:
        path: The graph file.
        proto: The content of the file, without external data; read from the file if `None`.

    Raises:
        IntegrityError: The graph cannot be read.
    """
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)
    try:
        model = ir.from_proto(proto or onnx.load(path, load_external_data=False))
        ir.external_data.set_base_dir(model.graph, path.parent)
        for inner in model.graphs():
            for value in inner.initializers.values():
                if isinstance(value.const_value, ir.ExternalTensor):
                    value.const_value = _resolved_link(value.const_value, path)
        for graph in (model.graph, *model.functions.values()):
            for node in ir.traversal.RecursiveGraphIterator(graph):
                for name, attribute in node.attributes.items():
                    if isinstance(attribute.value, ir.ExternalTensor):
                        attribute.value.base_dir = path.parent
                        tensor = _resolved_link(attribute.value, path)
                        node.attributes[name] = ir.AttrTensor(name, in_memory(tensor))
    # For damaged files, onnx_ir raises many types of errors: those of protobuf and of NumPy, and its own types.
    except Exception as error:
        raise unreadable(path, error) from error
    return model


def unreadable(path: Path, error: Exception) -> IntegrityError:
    """Return the error for a graph file that cannot be read."""
    return IntegrityError(f"The file {path} cannot be read as ONNX: {error}.", fix=COPY_AGAIN)


def _resolved_link(tensor: ir.ExternalTensor, graph: Path) -> ir.ExternalTensor:
    """Return a weight whose location is the target of the weight file's symbolic link.

    The weight stays unchanged if this target is not in the folder of the target of the graph file's link.

    In a Hub snapshot, each file is a link to a file with another name in another folder. onnx_ir and ONNX Runtime
    refuse to read weights through such links.
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


def in_memory(tensor: ir.ExternalTensor) -> ir.Tensor:
    """Read an external weight from its file into memory."""
    return ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)


def save_graphs(models: Mapping[str, ir.Model], folder: Path) -> tuple[str, ...]:
    """Write graphs into a folder, and one file with the weights of all graphs next to the graph files.

    Weights with the same bytes are stored once, for example tied weights, embeddings that are also the output layer,
    and tables that both the encoder and the decoder contain.

    Args:
        models: The graphs by file name.
        folder: The folder to write to.

    Returns:
        The names of the weight files.
    """
    for model in models.values():
        prepare_to_write(model)
    first_path = Path(next(iter(models)))
    weights = first_path.with_name(f"{first_path.name}.data" if len(models) == 1 else SHARED_WEIGHTS)
    base = (folder / weights).parent
    base.mkdir(parents=True, exist_ok=True)
    offsets: dict[object, tuple[int, int]] = {}
    stored: dict[bytes, tuple[int, int]] = {}
    replaced = [entry for model in models.values() for entry in _external_weights(model)]
    with (folder / weights).open("wb") as file:
        for _, tensor in replaced:
            key = identity(tensor)
            if key in offsets:
                continue
            # A weight in a checkpoint is read once, for its digest and for the file.
            values = tensor.read() if isinstance(tensor, CheckpointTensor) else tensor
            digest = content(values)
            if digest not in stored:
                alignment = _PAGE_BYTES if tensor.nbytes >= _LARGE_BYTES else _ELEMENT_BYTES
                file.write(b"\0" * (-file.tell() % alignment))
                stored[digest] = (file.tell(), tensor.nbytes)
                if hasattr(values, "tofile"):
                    values.tofile(file)
                else:
                    file.write(values.tobytes())
            offsets[key] = stored[digest]
    for value, tensor in replaced:
        offset, length = offsets[identity(tensor)]
        value.const_value = ir.ExternalTensor(
            weights.name, offset, length, tensor.dtype, shape=tensor.shape, name=str(value.name), base_dir=base
        )
    try:
        for name, model in models.items():
            model.metadata_props[MARK] = MANIFEST
            write_graph(model, folder / name)
    finally:
        # Give the caller's graphs their original weights again; only `write_graph` needed weights in the new file.
        for value, tensor in replaced:
            value.const_value = tensor
    if not offsets:
        (folder / weights).unlink()
    return (str(weights),) if offsets else ()


def _external_weights(model: ir.Model) -> list[tuple[ir.Value, Any]]:
    """Return the initializers that are stored in the weight file, with their tensors."""
    weights = []
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < INLINE_BYTES or tensor.dtype == ir.DataType.STRING:
                if isinstance(tensor, ir.ExternalTensor):
                    # Another tool stored this small weight externally; accel stores it in the graph.
                    value.const_value = in_memory(tensor)
                continue
            weights.append((value, tensor))
    return weights


def as_read_again(models: Mapping[str, ir.Model]) -> dict[str, ir.Model]:
    """Return graphs as `save_graphs` would write them and `read_graph` would read them, but with their weights unchanged.

    A stage writes the same graph, whether it gets the result of this function or reads the graph of the stage before from a file.
    """
    tensors: list[Any] = []
    numbers: dict[object, int] = {}
    read = {}
    for name, model in models.items():
        prepare_to_write(model)
        replaced = _external_weights(model)
        for value, tensor in replaced:
            # Equal weights have equal keys after they were read from a file, because a file contains them once.
            same: object = identity(tensor) if isinstance(tensor, CheckpointTensor) else content(tensor)
            number = numbers.setdefault(same, len(tensors))
            if number == len(tensors):
                tensors.append(tensor)
            value.const_value = ir.ExternalTensor(
                SHARED_WEIGHTS, number, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=str(value.name)
            )
        model.metadata_props[MARK] = MANIFEST
        read[name] = ir.from_proto(_graph_proto(model))
        for value, tensor in replaced:
            value.const_value = tensor
        for graph in read[name].graphs():
            for value in graph.initializers.values():
                if isinstance(value.const_value, ir.ExternalTensor):
                    value.const_value = tensors[value.const_value.offset or 0]
    return read


def prepare_to_write(model: ir.Model) -> None:
    """Make names unique and import the domain of ONNX Runtime's own operators, as ONNX requires."""
    if len(list(model.graphs())) > 1:
        # `NewNodes` makes names unique within one graph only, but ONNX requires names that are unique across a graph
        # and its subgraphs.
        passes.NameFixPass()(model)
    if MICROSOFT in operator_domains(model):
        model.opset_imports.setdefault(MICROSOFT, 1)


def merge_initializers(model: ir.Model) -> None:
    """Use a single initializer for all layers that share a weight in memory; weights are not read.

    The optimizer that the exporter runs transposes a shared weight once for each layer that uses the weight. The result
    is several initializers with the same memory.
    """
    for graph in model.graphs():
        initializers: dict[object, ir.Value] = {}
        for name, value in list(graph.initializers.items()):
            if value.const_value is None or value.is_graph_input() or value.is_graph_output():
                continue
            initializer = initializers.setdefault((identity(value.const_value), str(value.shape)), value)
            if initializer is not value:
                value.replace_all_uses_with(initializer)
                del graph.initializers[name]


def save_graph(model: ir.Model, path: Path) -> None:
    """Write one graph to `path`, and its weights to `<name>.data` next to it."""
    save_graphs({path.name: model}, path.parent)


def write_graph(model: ir.Model, path: Path) -> None:
    """Write a graph file; only the `value_info` entries of initializers are left out.

    Initializers already have types and shapes. ONNX Runtime's `quantize_dynamic` transposes some initializers and fails
    if the shape is also recorded in `value_info`.
    """
    path.write_bytes(_graph_proto(model).SerializeToString())


def _graph_proto(model: ir.Model) -> Any:
    """Return the content of a graph file, without `value_info` entries of initializers."""
    stored = [v for graph in model.graphs() for v in graph.initializers.values() if not v.is_graph_input()]
    described = [(value, value.type, value.shape) for value in stored]
    for value in stored:
        value.type = value.shape = None
    try:
        return ir.to_proto(model)
    finally:
        for value, kind, shape in described:
            value.type, value.shape = kind, shape


def content(tensor: Any) -> bytes:
    """Return the SHA-256 digest of a weight's bytes (32 bytes). Takes about a second for two gigabytes."""
    if tensor.dtype.bitwidth < 8:
        return hashlib.sha256(tensor.tobytes()).digest()
    return hashlib.sha256(np.ascontiguousarray(tensor.numpy()).view(np.uint8).data).digest()


def identity(tensor: Any) -> object:
    """Return a key that is equal for weights in the same memory or at the same file position.

    The key is valid as long as the weights exist.
    """
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
    """Write an artifact with the graphs that a stage made; copy the tokenizer and other companion files.

    The manifest is the manifest of the input artifact with one more step. Component specs stay the same, because a
    stage never changes inputs and outputs. Only the operator domains and the data types of the KV cache buffers, which
    are internal, are read from the graphs.
    """
    parent = as_in_graphs(parent, models)
    weights = save_graphs({component.file: models[component.name] for component in parent.components}, out)
    components = with_files(out, parent.components, [[component.file, *weights] for component in parent.components])
    if parent.path != out:
        copy_companions(parent.path, out)
        if (parent.path / _EXPORT_MANIFEST).is_file():
            shutil.copyfile(parent.path / _EXPORT_MANIFEST, out / _EXPORT_MANIFEST)
    opsets = [model.opset_imports.get("") for model in models.values()]
    return parent.after(
        step,
        out,
        components=components,
        dtype=dtype or parent.manifest.dtype,
        opset=opsets[0] if opsets else parent.manifest.opset,
        quantization=quantization or parent.manifest.quantization,
    )


def as_in_graphs(artifact: Artifact, models: Mapping[str, ir.Model]) -> Artifact:
    """Return the artifact with operator domains, and data types of KV cache inputs and outputs, as the graphs have them."""

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
    """Return the sorted domains of the operators in a graph.

    If the file defines ONNX functions, the operators inside the functions count, not the functions themselves.
    """
    defined_functions = {(key[0], key[1]) for key in model.functions}
    function_nodes = [node for function in model.functions.values() for node in function.all_nodes()]
    candidates = [*(node for graph in model.graphs() for node in graph), *function_nodes]
    return tuple(
        sorted(
            {
                "" if node.domain == "ai.onnx" else node.domain
                for node in candidates
                if (node.domain, node.op_type) not in defined_functions
            }
        )
    )


def nodes(model: ir.Model, *operators: str, domain: str = "") -> Iterator[ir.Node]:
    """Iterate over nodes of these operators in the graph and its subgraphs; the graph may be changed during the iteration."""
    matches = [
        node for graph in model.graphs() for node in graph if node.op_type in operators and node.domain == domain
    ]
    for node in matches:
        if node.graph is not None:
            yield node


def constant(value: ir.Value | None) -> np.ndarray | None:
    """Return the array of a constant (an initializer or the output of a `Constant` node); `None` for other values."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def is_constant(value: ir.Value | None) -> bool:
    """Return whether `constant` returns an array for a value. The array is not read."""
    return value is not None and not value.is_graph_input() and ir.convenience.get_const_tensor(value) is not None


def scalar(value: ir.Value | None) -> float | None:
    """Return the number in a constant that has one element; `None` for other values."""
    if value is None or (value.shape is not None and value.shape.rank() > 1):
        return None
    array = constant(value)
    return float(array.reshape(())) if array is not None and array.size == 1 else None


def add_initializer(graph: ir.Graph, name: str, array: np.ndarray | CheckpointTensor) -> ir.Value:
    """Add a constant with the array's shape and data type to the graph; if the name exists, a number is appended."""
    unique, n = name, 1
    while unique in graph.initializers:
        unique, n = f"{name}_{n}", n + 1
    if isinstance(array, CheckpointTensor):
        tensor, array.name = array, unique
    else:
        # Do not use `ascontiguousarray` here: it would give a scalar an axis.
        tensor = ir.tensor(np.asarray(array, order="C"), name=unique)
    value = ir.Value(
        name=unique, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tuple(array.shape))
    )
    graph.register_initializer(value)
    return value


class NewNodes:
    """A group of nodes that is added to a graph together.

    Args:
        graph: The graph. Constants are registered in it immediately; the caller inserts `nodes`.
        name: Prefix of the names of constants. The graph names unnamed nodes when they are inserted.
    """

    def __init__(self, graph: ir.Graph, name: str) -> None:
        self.graph = graph
        self.name = name
        self.nodes: list[ir.Node] = []

    def op(
        self,
        operator: str,
        *inputs: ir.Value | None,
        like: ir.Value | None = None,
        dtype: ir.DataType | None = None,
        shape: Sequence[int | str | ir.SymbolicDim] | None = None,
        domain: str = "",
        name: str | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Add a node and return its output.

        Args:
            operator: The operator type.
            inputs: The node's inputs.
            like: A value whose data type and shape the output gets.
            dtype: The output's data type, if it differs from that of `like`.
            shape: The output's shape, if it differs from that of `like`.
            domain: The operator's domain.
            name: The node's name.
            attributes: The node's attributes by name.
        """
        node = ir.node(operator, inputs, attributes or None, domain=domain, name=name)
        value = node.outputs[0]
        if like is not None:
            value.type, value.shape = like.type, like.shape
        if dtype is not None:
            value.type = ir.TensorType(dtype)
        if shape is not None:
            value.shape = ir.Shape(shape)
        self.nodes.append(node)
        return value

    def constant(self, values: Any, dtype: Any = np.int64) -> ir.Value:
        """Add a constant and return it; the data type is int64 by default."""
        return add_initializer(self.graph, f"{self.name}.constant", np.asarray(values, dtype))


def root_graph(node: ir.Node) -> ir.Graph:
    """Return the graph that contains a node; constants are registered in this graph."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    return graph


def serialized(model: ir.Model) -> bytes:
    """Return the model as serialized protobuf; external weights stay in their files."""
    return bytes(ir.to_proto(model).SerializeToString())


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Replace every use of `old` by `new`; a graph output keeps its name, data type and shape."""
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
    """Replace a node by another node with the same output data type and shape. Unused producers are removed later."""
    graph = root_graph(old)
    graph.insert_before(old, new)
    new.outputs[0].type, new.outputs[0].shape = old.outputs[0].type, old.outputs[0].shape
    replace_value(old.outputs[0], new.outputs[0])
    graph.remove(old, safe=True)


def insert_after(value: ir.Value, graph: ir.Graph, new_nodes: Sequence[ir.Node]) -> None:
    """Insert nodes after the producer of a value, or at the start of the graph if no node of this graph produces the value."""
    maker = value.producer()
    if maker is not None and maker.graph is graph:
        graph.insert_after(maker, new_nodes)
    elif len(graph):
        graph.insert_before(graph[0], new_nodes)
    else:
        graph.extend(new_nodes)


def layer_name(node: ir.Node) -> str:
    """Return the name of the module that a node belongs to.

    Graphs of other tools, and graphs of older versions of accel, do not contain this name. Then it is the name before `.bias` or `.weight`
    of a weight, or else the node's name.
    """
    if MODULE in node.metadata_props:
        return str(node.metadata_props[MODULE])
    candidates: list[ir.Value | None] = list(node.inputs[1:])
    for use in node.outputs[0].uses():
        if use.node.op_type == "Add":
            candidates += use.node.inputs
    for suffix in (".bias", ".weight"):
        for value in candidates:
            if value is not None and value.is_initializer() and str(value.name).endswith(suffix):
                return str(value.name).removesuffix(suffix)
    return str(node.name)
