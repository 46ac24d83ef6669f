"""Rewrites of products with constant matrices to 8-bit integer arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ..graph.analysis import only_user
from ..graph.editing import MICROSOFT, NewNodes, add_initializer, constant, insert_after, replace_value, root_graph
from .integer_weights import Int8Weight, quantize_int8
from .layers import QuantizableLayer


class IntegerRewriter:
    """Rewriter of one model's layers to integer arithmetic; an input or weight that several layers share is quantized once.

    Args:
        per_channel: Whether weights have one scale for each output channel instead of one for the whole matrix.
        symmetric: Whether the zero points of weights are 0.
        reduce_range: Whether weights use only 7 bits.
    """

    def __init__(self, *, per_channel: bool = True, symmetric: bool = True, reduce_range: bool = False) -> None:
        self._per_channel = per_channel
        self._symmetric = symmetric
        self._reduce_range = reduce_range
        self._activations: dict[tuple[object, ...], Sequence[ir.Value]] = {}
        self._weights: dict[tuple[int, object], tuple[Int8Weight, list[ir.Value]]] = {}

    def _stored(self, layer: QuantizableLayer) -> tuple[Int8Weight, list[ir.Value]]:
        """Return a layer's quantized weight, and the constants of the graph with the weight's integers, scale and zero point."""
        graph, base = root_graph(layer.node), str(layer.node.name)
        key = (id(graph), self._weight_key(layer))
        if key not in self._weights:
            weight = self._weight(layer)
            arrays = {"quantized": weight.values, "scale": weight.scale, "zero_point": weight.zero_point}
            constants = [add_initializer(graph, f"{base}.weight_{name}", array) for name, array in arrays.items()]
            self._weights[key] = (weight, constants)
        return self._weights[key]

    def _weight_key(self, layer: QuantizableLayer) -> object:
        return layer.weight_key

    def _weight(self, layer: QuantizableLayer) -> Int8Weight:
        return quantize_int8(
            layer.weight(),
            per_channel=self._per_channel,
            symmetric=self._symmetric,
            reduce_range=self._reduce_range,
        )

    def dynamic(self, layers: Sequence[QuantizableLayer]) -> None:
        """Rewrite layers so that activations are quantized at run time.

        The new operators are `DynamicQuantizeLinear` and `MatMulInteger`. When ONNX Runtime loads the graph, it fuses
        both operators into one kernel.
        """
        for layer in layers:
            new, (_, (values, scale, zero)) = (
                NewNodes(root_graph(layer.node), str(layer.node.name)),
                self._stored(layer),
            )
            x, x_scale, x_zero = self._dynamic_activation(layer)
            product = new.op("MatMulInteger", x, values, x_zero, zero)
            scales = new.op("Mul", x_scale, scale)
            finish(layer, new, new.op("Mul", new.op("Cast", product, to=ir.DataType.FLOAT), scales))

    def static(
        self, layers: Sequence[QuantizableLayer], ranges: Mapping[str, tuple[float, float]], *, signed: bool
    ) -> None:
        """Rewrite layers with Q/DQ pairs: activations get fixed scales, weights are stored as integers.

        When ONNX Runtime loads the graph, it fuses the two `DequantizeLinear` nodes and the product into one integer
        product. The results of products stay in floating point, because rounding the results to 8 bits takes time.

        Args:
            layers: The layers to rewrite.
            ranges: The range (low, high) of each layer's activation, by activation name.
            signed: Whether activations are symmetric `int8` instead of `uint8`.
        """
        for layer in layers:
            new, source = NewNodes(root_graph(layer.node), str(layer.node.name)), layer.activation
            x, x_scale, x_zero = self._static_activation(layer, ranges, signed)
            weight, constants = self._stored(layer)
            shape = weight.values.shape
            operands = [
                new.op("DequantizeLinear", x, x_scale, x_zero, like=source),
                new.op("DequantizeLinear", *constants, axis=1, like=source, shape=shape),
            ]
            bias_add = _bias_of(layer, shape[1])
            if bias_add is None or source.shape is None or source.shape.rank() != 2:
                finish(layer, new, new.op("MatMul", *operands))
                continue
            # ONNX Runtime fuses a two-dimensional product and its bias to `Gemm` before it searches for Q/DQ pairs. It
            # converts a `Gemm` with Q/DQ pairs to an integer operator only if the bias is an integer.
            bias = _integer_bias(new, bias_add[1], x_scale, weight.scale)
            finish(layer, new, new.op("Gemm", *operands, bias), bias_add)

    def static_operators(
        self, layers: Sequence[QuantizableLayer], ranges: Mapping[str, tuple[float, float]], *, signed: bool
    ) -> None:
        """Rewrite layers like `static`, but write the integer operator to which ONNX Runtime would convert the Q/DQ pairs.

        The operator is `com.microsoft.MatMulIntegerToFloat`, which also adds the bias.
        """
        for layer in layers:
            new, (weight, (values, scale, zero)) = (
                NewNodes(root_graph(layer.node), str(layer.node.name)),
                self._stored(layer),
            )
            x, x_scale, x_zero = self._static_activation(layer, ranges, signed)
            inputs = [x, values, x_scale, scale, x_zero, zero]
            bias_add = _bias_of(layer, weight.values.shape[1])
            if bias_add is not None:
                inputs.append(bias_add[1])
            finish(layer, new, new.op("MatMulIntegerToFloat", *inputs, domain=MICROSOFT), bias_add)

    def _static_activation(
        self, layer: QuantizableLayer, ranges: Mapping[str, tuple[float, float]], signed: bool
    ) -> Sequence[ir.Value]:
        scale, zero = activation_scale(*ranges[str(layer.activation.name)], signed=signed)
        return self._rounded(layer, scale, zero)

    def _rounded(self, layer: QuantizableLayer, scale: np.ndarray, zero: np.ndarray) -> Sequence[ir.Value]:
        """Return a layer's quantized activation, scale and zero point; layers with the same input and scale share all three."""
        source, new = layer.activation, NewNodes(root_graph(layer.node), str(layer.activation.name))
        key = (id(new.graph), id(source), scale.tobytes(), zero.tobytes(), str(zero.dtype))
        if key not in self._activations:
            constants = [
                add_initializer(new.graph, f"{new.name}.{kind}", array)
                for kind, array in (("scale", scale), ("zero_point", zero))
            ]
            dtype = ir.DataType.INT8 if zero.dtype == np.int8 else ir.DataType.UINT8
            rounded = new.op("QuantizeLinear", source, *constants, like=source, dtype=dtype)
            insert_after(source, new.graph, new.nodes)
            self._activations[key] = (rounded, *constants)
        return self._activations[key]

    def _dynamic_activation(self, layer: QuantizableLayer) -> Sequence[ir.Value]:
        graph, source = root_graph(layer.node), layer.activation
        key = (id(graph), id(source))
        if key not in self._activations:
            quantize = ir.node("DynamicQuantizeLinear", [source], num_outputs=3, name=f"{source.name}.quantize")
            insert_after(source, graph, [quantize])
            self._activations[key] = quantize.outputs
        return self._activations[key]


def _integer_bias(new: NewNodes, bias: ir.Value, x_scale: ir.Value, w_scale: np.ndarray) -> ir.Value:
    """Return a `DequantizeLinear` of the bias as int32; the scale is that of the integer product of activation and weight."""
    values, step = constant(bias), constant(x_scale)
    assert values is not None
    assert step is not None
    scale, limit = (step * w_scale).astype(np.float32), 2**31 - 1
    rounded = np.clip(np.rint(values.astype(np.float64) / scale), -limit, limit).astype(np.int32)
    inputs = [
        add_initializer(new.graph, f"{new.name}.bias_{kind}", array)
        for kind, array in (("quantized", rounded), ("scale", scale), ("zero_point", np.zeros(scale.shape, np.int32)))
    ]
    # The axis is for one scale for each channel; for a single scale, ONNX Runtime ignores the axis.
    return new.op("DequantizeLinear", *inputs, like=bias, axis=0)


def activation_scale(low: float, high: float, *, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return scale and zero point, both of shape `()`, for a range that contains zero.

    `int8` is symmetric around zero; `uint8` uses all 256 steps.
    """
    if signed:
        scale = max(abs(low), abs(high)) / 127 or 1.0
        return np.array(scale, np.float32), np.array(0, np.int8)
    scale = (high - low) / 255 or 1.0
    zero = min(max(round(-low / scale), 0), 255)
    return np.array(scale, np.float32), np.array(zero, np.uint8)


def _bias_of(layer: QuantizableLayer, outer: int) -> tuple[ir.Node, ir.Value] | None:
    """Return the node that adds a layer's constant bias, and the bias; `None` if there is no such node.

    The node is the `Gemm` itself, or an `Add` that is the only reader of a `MatMul`.
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


def finish(
    layer: QuantizableLayer, new: NewNodes, product: ir.Value, added: tuple[ir.Node, ir.Value] | None = None
) -> None:
    """Replace a layer by new nodes; if the layer is a `Gemm` whose bias the new nodes lack, add the bias.

    Args:
        layer: The layer to replace.
        new: The new nodes.
        product: The result of the new nodes.
        added: The result of `_bias_of` if the new nodes already add the bias.
    """
    node = layer.node
    last_node = added[0] if added is not None else node
    old_result = last_node.outputs[0]
    product.type, product.shape = old_result.type, old_result.shape
    bias = node.inputs[2] if added is None and node.op_type == "Gemm" and len(node.inputs) > 2 else None
    if bias is not None:
        beta = node.attributes.get_float("beta", 1.0)
        if beta != 1.0:
            bias = new.op("Mul", bias, new.constant(beta, (bias.dtype or ir.DataType.FLOAT).numpy()))
        product = new.op("Add", product, bias, like=old_result)
    new.graph.insert_before(node, new.nodes)
    _take_name(old_result, product)
    new.graph.remove(last_node, safe=True)
    if last_node is not node:
        new.graph.remove(node, safe=True)


def _take_name(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new`, and rename `new` to the name of `old`, because calibrated ranges are stored by name."""
    name, is_output = old.name, old.is_graph_output()
    replace_value(old, new)
    if not is_output:
        old.name, new.name = f"{name}_replaced", name
