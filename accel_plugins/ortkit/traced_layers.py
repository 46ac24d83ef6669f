"""Layers of an ONNX graph with the values before and after them, and a runner that returns or replaces these values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from accel.artifact import Artifact, Component
from accel.capture import MODULE
from accel.config import available_processors
from accel.errors import SessionError
from accel.interfaces.layer_traces import LayerValues, TracedLayer

from .graph.analysis import producer
from .graph.editing import constant, is_constant, load_graph
from .quantization.calibrators import prompt_inputs, session_in_memory
from .upstream import RUN_ERRORS

_PRODUCTS = (
    "MatMul",
    "Gemm",
    "FusedMatMul",
    "MatMulNBits",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
)
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast")
_SUFFIXES = (".weight_quantized", ".weight_blocks", ".weight", ".bias")


@dataclass(frozen=True, slots=True)
class GraphLayer:
    """A layer in a graph.

    Attributes:
        name: Name of the module, or of the node if the module is unknown.
        kind: `linear`, `embedding` or `norm`.
        shape: Shape of the weight.
        bias: Whether the output includes the bias.
        input: The value before the layer and its quantization.
        reader: The node that reads the input: the layer, or its quantization.
        position: Index of the input in the inputs of `reader`.
        output: The value after the product, the scaling and the bias.
        weight: The value that contains the weight, `(inputs, outputs)` if `turned` is false; `None` for packed weights.
        turned: Whether the stored weight is transposed.
        limit: Largest absolute value of the quantized input.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bias: bool
    input: ir.Value
    reader: ir.Node
    position: int
    output: ir.Value
    weight: ir.Value | None
    turned: bool
    limit: float | None


def graph_layers(model: ir.Model) -> list[GraphLayer]:
    """Return the layers of the main graph in order. The second layer with the same name is called `NAME#1`."""
    layers: list[GraphLayer] = []
    counts: dict[str, int] = {}
    for node in model.graph:
        layer = _layer(node)
        if layer is not None:
            count = counts[layer.name] = counts.get(layer.name, -1) + 1
            layers.append(replace(layer, name=f"{layer.name}#{count}") if count else layer)
    return layers


_READS = ("DequantizeLinear", "Cast")
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _layer(node: ir.Node) -> GraphLayer | None:
    if node.op_type == "Gather" and is_constant(node.inputs[0]) and node.inputs[1] is not None:
        table = node.inputs[0]
        assert table is not None
        if table.shape is None or table.shape.rank() != 2 or table.dtype not in _FLOATS or is_constant(node.inputs[1]):
            return None
        return GraphLayer(
            _name(node, []), "embedding", table.shape.numpy(), False, node.inputs[1], node, 1, node.outputs[0], table,
            False, None,
        )  # fmt: skip
    if node.op_type in _NORMS and node.inputs[0] is not None and node.inputs[1] is not None:
        scale = node.inputs[1]
        if not is_constant(scale) or scale.shape is None or scale.shape.rank() != 1:
            return None
        bias = len(node.inputs) > 2 and node.inputs[2] is not None
        return GraphLayer(
            _name(node, [scale]), "norm", scale.shape.numpy(), bias, node.inputs[0], node, 0, node.outputs[0], scale,
            False, None,
        )  # fmt: skip
    if node.op_type not in _PRODUCTS or node.inputs[0] is None or node.inputs[1] is None:
        return None
    stored, turned = _weight(node)
    if stored is None and node.op_type != "MatMulNBits":
        return None
    reader, position, limit = _reader(node)
    source = reader.inputs[position]
    assert source is not None
    output, bias, constants = _output(node)
    if node.op_type == "MatMulNBits":
        shape: tuple[int, ...] = (node.attributes.get_int("K"), node.attributes.get_int("N"))
    else:
        source_shape = _constant_of(stored)
        assert source_shape is not None
        assert source_shape.shape is not None
        shape = source_shape.shape.numpy()[:: -1 if turned else 1]
    if len(shape) != 2 or is_constant(source):
        return None
    readable = node.op_type in ("MatMul", "Gemm", "FusedMatMul")
    named = [node.inputs[1], stored, *constants]
    return GraphLayer(
        _name(node, named), "linear", shape, bias, source, reader, position, output,
        stored if readable else None, turned, limit,
    )  # fmt: skip


def _weight(node: ir.Node) -> tuple[ir.Value | None, bool]:
    """Return the value with the matrix of a product, through a transposition, and whether it is transposed."""
    value, turned = node.inputs[1], node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
    transposed = producer(value, "Transpose")
    if transposed is not None:
        value, turned = transposed.inputs[0], not turned
    return (value, turned) if _constant_of(value) is not None else (None, False)


def _constant_of(value: ir.Value | None) -> ir.Value | None:
    """Return the constant that a weight is read from, through conversions and dequantizations."""
    while value is not None and (parent := value.producer()) is not None and parent.op_type in _READS:
        value = parent.inputs[0]
    return value if is_constant(value) else None


def _reader(node: ir.Node) -> tuple[ir.Node, int, float | None]:
    """Return the first node of the quantization of a product's activation, and the largest value that it represents."""
    reader, limit = node, None
    while True:
        value = reader.inputs[0]
        parent = value.producer() if value is not None else None
        if parent is None or parent.op_type not in _QUANTIZERS:
            return reader, 0, limit
        if parent.op_type == "Cast" and value is not None and value.dtype not in _FLOATS:
            return reader, 0, limit
        if parent.op_type == "QuantizeLinear":
            scale, zero = constant(parent.inputs[1]), constant(parent.inputs[2]) if len(parent.inputs) > 2 else None
            if scale is not None and scale.size == 1:
                low, high = (0, 255) if zero is None or zero.dtype == np.uint8 else (-128, 127)
                offset = 0 if zero is None else int(zero.reshape(()))
                limit = float(scale.reshape(())) * max(high - offset, offset - low)
        reader = parent


def _output(node: ir.Node) -> tuple[ir.Value, bool, list[ir.Value | None]]:
    """Return the value after the scaling and the bias of a product, whether it has a bias, and the constants on the way."""
    value, constants = node.outputs[0], list(node.inputs[2:])
    bias = node.op_type == "Gemm" and len(node.inputs) > 2
    bias = bias or (node.op_type == "MatMulIntegerToFloat" and len(node.inputs) > 6 and node.inputs[6] is not None)
    bias = bias or (node.op_type == "MatMulNBits" and len(node.inputs) > 5 and node.inputs[5] is not None)
    scaled = node.op_type != "MatMulInteger"
    while len(value.uses()) == 1 and not value.is_graph_output():
        use = value.uses()[0].node
        if use.op_type == "Cast" and not scaled:
            value = use.outputs[0]
        elif use.op_type == "Mul" and not scaled:
            value, scaled = use.outputs[0], True
        elif use.op_type == "Add" and not bias and any(is_constant(v) and _is_vector(v) for v in use.inputs):
            constants += use.inputs
            return use.outputs[0], True, constants
        else:
            break
    return value, bias, constants


def _is_vector(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and value.shape.rank() == 1


def _name(node: ir.Node, values: list[ir.Value | None]) -> str:
    """Return the name of the module from the metadata, a constant's name, or the node's name."""
    if MODULE in node.metadata_props:
        return str(node.metadata_props[MODULE])
    for value in (*values, *node.inputs):
        text = str(value.name) if value is not None and value.is_initializer() else ""
        for suffix in _SUFFIXES:
            stem = text.removesuffix(suffix)
            if stem != text and "." in stem:
                return stem
    # PyTorch's earlier exporter names a node after its modules: `/encoder/layer.0/query/MatMul`.
    text = str(node.name)
    return text.strip("/").rpartition("/")[0].replace("/", ".") if text.startswith("/") else text


class OnnxLayerTrace:
    """An ONNX graph that returns the values of its layers, on ONNX Runtime's CPU provider.

    Args:
        artifact: The artifact.
        component: The component of the graph.
    """

    def __init__(self, artifact: Artifact, component: Component) -> None:
        self._artifact, self._component = artifact, component
        layers = graph_layers(load_graph(artifact, component))
        self._names = [layer.name for layer in layers]
        self.layers = [
            TracedLayer(
                layer.name, layer.kind, layer.shape, layer.bias,
                partial(self._weight, layer), layer.limit,
            )
            for layer in layers
        ]  # fmt: skip
        self._sessions: dict[bool, tuple[Any, dict[str, str], dict[str, str]]] = {}

    def run(self, feeds: Mapping[str, torch.Tensor], replaced: LayerValues | None = None) -> LayerValues:
        """Run the graph; see `LayerTrace.run`."""
        session, before, after = self._opened(replaced is not None)
        arrays = self._arrays(feeds)
        if replaced is not None:
            plain = self.run(feeds)
            for name in self._names:
                for prefix, computed, other in (
                    ("input", plain.inputs[name], replaced.inputs.get(name)),
                    ("output", plain.outputs[name], replaced.outputs.get(name)),
                ):
                    fits = other is not None and other.numel() == computed.numel()
                    value = other.to(computed.dtype).reshape(computed.shape) if fits and other is not None else computed
                    arrays[f"replaced.{prefix}.{name}"] = value.numpy()
        names = list(dict.fromkeys([*before.values(), *after.values(), *(s.name for s in self._component.outputs)]))
        graph_inputs = {item.name for item in session.get_inputs()}
        requested = [name for name in names if name not in graph_inputs]
        try:
            results = session.run(requested, {name: a for name, a in arrays.items() if name in graph_inputs})
        except RUN_ERRORS as error:
            raise SessionError(
                f"The graph {self._component.file} fails when the values of its layers are read: {' '.join(str(error).split())[:300]}",
                fix="check the graph with `accel validate FOLDER`.",
            ) from error
        values = {name: torch.from_numpy(np.array(v)) for name, v in zip(requested, results, strict=True)}
        values |= {name: torch.from_numpy(np.array(arrays[name])) for name in names if name in arrays}
        outputs = {spec.name for spec in self._component.outputs if spec.pair is None}
        return LayerValues(
            {name: values[value] for name, value in before.items()},
            {name: values[value] for name, value in after.items()},
            {name: self._result(name, values[name], after, arrays) for name in outputs},
        )

    @staticmethod
    def _result(
        name: str, value: torch.Tensor, after: Mapping[str, str], arrays: Mapping[str, np.ndarray]
    ) -> torch.Tensor:
        """Return an output of the graph. If it is the output of a layer, its replacement is the output."""
        layer = next((layer for layer, output in after.items() if output == name), None)
        key = f"replaced.output.{layer}"
        return torch.from_numpy(arrays[key]) if key in arrays else value

    def _arrays(self, feeds: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        inputs = dict(feeds)
        if self._component.stateful:
            rows, length = feeds["input_ids"].shape
            inputs = {**prompt_inputs(self._component, rows, length, feeds), **feeds}
        return {
            spec.name: np.ascontiguousarray(inputs[spec.name].cpu().numpy().astype(spec.dtype, copy=False))
            for spec in self._component.inputs
            if spec.name in inputs
        }

    def _opened(self, replaces: bool) -> tuple[Any, dict[str, str], dict[str, str]]:
        """Return a session, and the names of the values before and after each layer."""
        if replaces not in self._sessions:
            model = load_graph(self._artifact, self._component)
            layers = graph_layers(model)
            before = {layer.name: str(layer.input.name) for layer in layers}
            after = {layer.name: str(layer.output.name) for layer in layers}
            if replaces:
                before = _replace_all(model, layers)
            outputs = {value.name for value in model.graph.outputs}
            inputs = {value.name for value in model.graph.inputs}
            for value in (item for layer in layers for item in (layer.input, layer.output)):
                if value.name not in outputs and value.name not in inputs:
                    model.graph.outputs.append(value)
                    outputs.add(value.name)
            # ONNX Runtime removes unused initializers, and refuses values for them.
            for name in [name for name, value in model.graph.initializers.items() if not value.uses()]:
                if not model.graph.initializers[name].is_graph_output():
                    del model.graph.initializers[name]
            options = ort.SessionOptions()
            options.intra_op_num_threads = available_processors()
            options.log_severity_level = 3
            self._sessions[replaces] = session_in_memory(model, options), before, after
        return self._sessions[replaces]

    def _weight(self, layer: GraphLayer) -> torch.Tensor | None:
        """Return the weight, if it is a constant that is at most converted or dequantized."""
        if layer.weight is None:
            return None
        weight = _values(layer.weight)
        return weight if weight is None or not layer.turned else weight.T


def _values(value: ir.Value | None) -> torch.Tensor | None:
    """Return a weight in float32, through conversions and dequantizations."""
    array = constant(value)
    if array is not None:
        return torch.from_numpy(np.array(array, np.float32))
    node = value.producer() if value is not None else None
    if node is None or node.op_type not in _READS:
        return None
    stored = _values(node.inputs[0])
    if stored is None:
        return None
    if node.op_type == "Cast":
        half = {ir.DataType.FLOAT16: torch.float16, ir.DataType.BFLOAT16: torch.bfloat16}
        return stored.to(half.get(ir.DataType(node.attributes.get_int("to")), torch.float32)).float()
    scale, zero = (_values(item) for item in (*node.inputs[1:], None)[:2])
    if scale is None or node.attributes.get_int("block_size", 0):
        return None
    axis = node.attributes.get_int("axis", 1) % stored.ndim
    sizes = [-1 if i == axis else 1 for i in range(stored.ndim)] if scale.ndim else []
    return (stored - (0 if zero is None else zero.reshape(sizes))) * scale.reshape(sizes)


def _replace_all(model: ir.Model, layers: Sequence[GraphLayer]) -> dict[str, str]:
    """Let each layer read a new graph input, and let the readers of its output read another. Return what computes each layer's input."""
    before: dict[str, str] = {}
    shared: dict[str, str] = {}
    for layer in layers:
        new = ir.Value(name=f"replaced.input.{layer.name}", type=layer.input.type, shape=layer.input.shape)
        model.graph.inputs.append(new)
        current = layer.reader.inputs[layer.position]
        assert current is not None
        # Layers may share the quantization of their input.
        before[layer.name] = shared.get(str(current.name), str(current.name))
        shared[str(new.name)] = before[layer.name]
        layer.reader.replace_input_with(layer.position, new)
        other = ir.Value(name=f"replaced.output.{layer.name}", type=layer.output.type, shape=layer.output.shape)
        model.graph.inputs.append(other)
        for use in tuple(layer.output.uses()):
            use.node.replace_input_with(use.idx, other)
    return before
