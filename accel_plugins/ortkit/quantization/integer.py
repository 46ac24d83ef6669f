"""Rewrites that let products with constants compute in 8-bit integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graph.analysis import only_user
from ..graph.editing import MICROSOFT, add_initializer, constant, insert_after, replace_value, root_graph
from .layers import Layer
from .weights import Int8Weight, quantize_int8

_FLOAT = ir.DataType.FLOAT


@dataclass(frozen=True, slots=True)
class _StoredWeight:
    """A quantized weight as constants of a graph, and the arrays that they hold."""

    values: ir.Value
    scale: ir.Value
    zero_point: ir.Value
    array: Int8Weight


class Rewriter:
    """Replaces layers of one model by integer arithmetic; what two layers share (an input, a weight) is quantized once.

    Args:
        per_channel: One scale for each output channel.
        symmetric: Whether weights have no zero point.
        reduce_range: Whether weights keep 7 bits.
    """

    def __init__(self, *, per_channel: bool, symmetric: bool, reduce_range: bool) -> None:
        self._per_channel = per_channel
        self._symmetric = symmetric
        self._reduce_range = reduce_range
        self._activations: dict[tuple[int, int], Sequence[ir.Value]] = {}
        self._weights: dict[tuple[int, object], _StoredWeight] = {}

    def _stored(self, layer: Layer) -> _StoredWeight:
        """The layer's integers, scale and zero point as constants of its graph."""
        graph, base = root_graph(layer.node), str(layer.node.name)
        key = (id(graph), self._weight_key(layer))
        if key not in self._weights:
            weight = self._weight(layer)
            self._weights[key] = _StoredWeight(
                add_initializer(graph, f"{base}.weight_quantized", weight.values),
                add_initializer(graph, f"{base}.weight_scale", weight.scale),
                add_initializer(graph, f"{base}.weight_zero_point", weight.zero_point),
                weight,
            )
        return self._weights[key]

    def _weight_key(self, layer: Layer) -> object:
        return layer.weight_key

    def _weight(self, layer: Layer) -> Int8Weight:
        return quantize_int8(
            layer.weight(),
            per_channel=self._per_channel,
            symmetric=self._symmetric,
            reduce_range=self._reduce_range,
        )

    def dynamic(self, layers: Sequence[Layer]) -> None:
        """Activations are quantized when they are known: `DynamicQuantizeLinear` and `MatMulInteger`, which ONNX Runtime
        fuses into one kernel at load.
        """
        for layer in layers:
            self._dynamic(layer)

    def _dynamic(self, layer: Layer) -> None:
        node, graph = layer.node, root_graph(layer.node)
        weight = self._stored(layer)
        x, x_scale, x_zero = self._dynamic_activation(layer)
        base = str(node.name)
        product = ir.node("MatMulInteger", [x, weight.values, x_zero, weight.zero_point], name=f"{base}.integer")
        cast = ir.node("Cast", [product.outputs[0]], {"to": _FLOAT}, name=f"{base}.cast")
        scales = ir.node("Mul", [x_scale, weight.scale], name=f"{base}.scales")
        result = ir.node("Mul", [cast.outputs[0], scales.outputs[0]], name=f"{base}.scaled")
        graph.insert_before(node, [product, cast, scales, result])
        finish(layer, result.outputs[0])

    def static(self, layers: Sequence[Layer], ranges: Mapping[str, tuple[float, float]], *, signed: bool) -> None:
        """Activations get fixed scales in Q/DQ pairs, weights are stored as integers behind a `DequantizeLinear`; ONNX
        Runtime turns each triple into one integer product at load. Products stay in float: rounding them costs time.

        Args:
            layers: To rewrite.
            ranges: Of each layer's activation, by name.
            signed: Whether activations are `int8` around zero, instead of `uint8`.
        """
        for layer in layers:
            node, graph, base = layer.node, root_graph(layer.node), str(layer.node.name)
            x, x_scale, x_zero = self._static_activation(layer, ranges, signed)
            weight = self._stored(layer)
            shape = weight.array.values.shape
            activation = ir.node("DequantizeLinear", [x, x_scale, x_zero], name=f"{base}.activation")
            matrix = ir.node(
                "DequantizeLinear", [weight.values, weight.scale, weight.zero_point], {"axis": 1}, name=f"{base}.weight"
            )
            source = layer.activation
            activation.outputs[0].type, activation.outputs[0].shape = source.type, source.shape
            matrix.outputs[0].type, matrix.outputs[0].shape = source.type, ir.Shape(shape)
            operands = [activation.outputs[0], matrix.outputs[0]]
            graph.insert_before(node, [activation, matrix])
            added = _bias_of(layer, shape[1])
            if added is None or source.shape is None or source.shape.rank() != 2:
                product = ir.node("MatMul", operands, name=f"{base}.product")
                graph.insert_before(node, product)
                finish(layer, product.outputs[0])
                continue
            # ONNX Runtime makes a Gemm of a two-dimensional product and its bias before it looks for Q/DQ pairs, and a
            # Gemm becomes an integer one only with an integer bias.
            bias = self._integer_bias(layer, added[1], x_scale, weight.array.scale)
            product = ir.node("Gemm", [*operands, bias], name=f"{base}.product")
            graph.insert_before(node, product)
            finish(layer, product.outputs[0], added)

    def _integer_bias(self, layer: Layer, bias: ir.Value, x_scale: ir.Value, w_scale: np.ndarray) -> ir.Value:
        """The bias as int32 in steps of the product's scale, behind a `DequantizeLinear`."""
        node, graph = layer.node, root_graph(layer.node)
        values, step = constant(bias), constant(x_scale)
        assert values is not None
        assert step is not None
        scale = (step * w_scale).astype(np.float32)
        limit = 2**31 - 1
        rounded = np.clip(np.rint(values.astype(np.float64) / scale), -limit, limit).astype(np.int32)
        inputs = [
            add_initializer(graph, f"{node.name}.bias_quantized", rounded),
            add_initializer(graph, f"{node.name}.bias_scale", scale),
            add_initializer(graph, f"{node.name}.bias_zero_point", np.zeros(scale.shape, np.int32)),
        ]
        dequantize = ir.node("DequantizeLinear", inputs, {"axis": 0} if scale.ndim else {}, name=f"{node.name}.bias")
        graph.insert_before(node, dequantize)
        dequantize.outputs[0].type, dequantize.outputs[0].shape = bias.type, bias.shape
        return dequantize.outputs[0]

    def static_operators(
        self, layers: Sequence[Layer], ranges: Mapping[str, tuple[float, float]], *, signed: bool
    ) -> None:
        """Like `static`, written as the integer operators that ONNX Runtime would make of it
        (`com.microsoft.MatMulIntegerToFloat`, which adds the bias, too).
        """
        for layer in layers:
            node, graph, base = layer.node, root_graph(layer.node), str(layer.node.name)
            x, x_scale, x_zero = self._static_activation(layer, ranges, signed)
            weight = self._stored(layer)
            inputs: list[ir.Value | None] = [x, weight.values, x_scale, weight.scale, x_zero, weight.zero_point]
            added = _bias_of(layer, weight.array.values.shape[1])
            if added is not None:
                inputs.append(added[1])
            product = ir.node("MatMulIntegerToFloat", inputs, domain=MICROSOFT, name=f"{base}.integer")
            graph.insert_before(node, product)
            finish(layer, product.outputs[0], added)

    def _static_activation(
        self, layer: Layer, ranges: Mapping[str, tuple[float, float]], signed: bool
    ) -> Sequence[ir.Value]:
        graph, source = root_graph(layer.node), layer.activation
        key = (id(graph), id(source))
        if key not in self._activations:
            scale, zero = activation_scale(*ranges[str(source.name)], signed=signed)
            scale_value = add_initializer(graph, f"{source.name}.scale", scale)
            zero_value = add_initializer(graph, f"{source.name}.zero_point", zero)
            quantize = ir.node("QuantizeLinear", [source, scale_value, zero_value], name=f"{source.name}.quantize")
            insert_after(source, graph, [quantize])
            quantize.outputs[0].shape = source.shape
            quantize.outputs[0].type = ir.TensorType(ir.DataType.INT8 if signed else ir.DataType.UINT8)
            self._activations[key] = (quantize.outputs[0], scale_value, zero_value)
        return self._activations[key]

    def _dynamic_activation(self, layer: Layer) -> Sequence[ir.Value]:
        graph, source = root_graph(layer.node), layer.activation
        key = (id(graph), id(source))
        if key not in self._activations:
            quantize = ir.node("DynamicQuantizeLinear", [source], num_outputs=3, name=f"{source.name}.quantize")
            insert_after(source, graph, [quantize])
            self._activations[key] = quantize.outputs
        return self._activations[key]


def activation_scale(low: float, high: float, *, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero point, of shape `()`, for a range that holds zero: `int8` is symmetric, `uint8` uses all 256 steps."""
    if signed:
        scale = max(abs(low), abs(high)) / 127 or 1.0
        return np.array(scale, np.float32), np.array(0, np.int8)
    scale = (high - low) / 255 or 1.0
    zero = min(max(round(-low / scale), 0), 255)
    return np.array(scale, np.float32), np.array(zero, np.uint8)


def _bias_of(layer: Layer, outer: int) -> tuple[ir.Node, ir.Value] | None:
    """The constant vector that a layer adds, and the node that adds it: the `Gemm` itself, or an `Add` that is the only
    reader of a `MatMul`.
    """
    node = layer.node
    if node.op_type == "Gemm":
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        plain = node.attributes.get_float("beta", 1.0) == 1.0
        return (node, bias) if bias is not None and plain and bias.is_initializer() and bias.shape == (outer,) else None
    add = only_user(node.outputs[0])
    if add is None or add.op_type != "Add" or add.graph is not node.graph:
        return None
    for value in add.inputs:
        if value is not None and value.is_initializer() and value.shape == (outer,):
            return add, value
    return None


def finish(layer: Layer, product: ir.Value, added: tuple[ir.Node, ir.Value] | None = None) -> None:
    """Put the new product in the layer's place, with the bias that a `Gemm` adds.

    Args:
        layer: What is replaced.
        product: The new product.
        added: From `_bias_of`, when the new product holds the bias already.
    """
    node, graph = layer.node, root_graph(layer.node)
    last = added[0] if added is not None else node
    old = last.outputs[0]
    product.type, product.shape = old.type, old.shape
    if added is not None:
        _take_name(old, product)
        graph.remove(last, safe=True)
        if last is not node:
            graph.remove(node, safe=True)
        return
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = node.inputs[2]
        beta = node.attributes.get_float("beta", 1.0)
        if beta != 1.0:
            array = constant(bias)
            if array is not None:
                bias = add_initializer(graph, f"{bias.name}.scaled", (array * np.float32(beta)).astype(array.dtype))
            else:
                factor = add_initializer(graph, f"{node.name}.beta", np.array(beta, np.float32))
                scaled = ir.node("Mul", [bias, factor], name=f"{node.name}.scaled_bias")
                graph.insert_before(node, scaled)
                bias = scaled.outputs[0]
        total = ir.node("Add", [product, bias], name=f"{node.name}.bias")
        graph.insert_before(node, total)
        product = total.outputs[0]
        product.type, product.shape = old.type, old.shape
    _take_name(old, product)
    graph.remove(node, safe=True)


def _take_name(old: ir.Value, new: ir.Value) -> None:
    """Everything that reads `old` reads `new`, which gets its name: calibrated ranges are looked up by it."""
    name, is_output = old.name, old.is_graph_output()
    replace_value(old, new)
    if not is_output:
        old.name, new.name = f"{name}_replaced", name
