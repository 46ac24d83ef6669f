"""Quantized layers of PyTorch models in ONNX: Q/DQ pairs for `accel_layers::integer_linear`, `MatMulNBits` for `::block_linear`.

The integers, scales and zero points are the model's own, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.capture import BLOCK_LINEAR, INTEGER_LINEAR, OPERATOR_DOMAIN

from ..graph.editing import MICROSOFT, add_initializer, constant, insert_after, layer_name, root_graph
from ..quantization.integer import Rewriter
from ..quantization.layers import Layer, constant_key
from ..quantization.weight_only import BlockConstants, add_blocks, put_blocks
from ..quantization.weights import Int8Weight

_FACTORS_APART = 8


def lower_quantized_layers(model: ir.Model) -> int:
    """Write every quantized layer of the graph with operators that runtimes have; returns how many there were.

    Args:
        model: Changed in place.
    """
    found = [node for node in model.graph if node.domain == OPERATOR_DOMAIN]
    integers = [Layer(node, layer_name(node)) for node in found if node.op_type == INTEGER_LINEAR]
    blocks = [Layer(node, layer_name(node)) for node in found if node.op_type == BLOCK_LINEAR]
    if not integers and not blocks:
        return 0
    _StoredIntegers().static(integers, {}, signed=False)
    stored: dict[object, BlockConstants] = {}
    for layer in blocks:
        _put_blocks(layer, stored)
    passes.RemoveUnusedNodesPass()(model)
    if blocks:
        model.opset_imports[MICROSOFT] = 1
    if not any(node.domain == OPERATOR_DOMAIN for node in model.graph):
        model.opset_imports.pop(OPERATOR_DOMAIN, None)
    return len(integers) + len(blocks)


class _StoredIntegers(Rewriter):
    """Rewrites layers with the integers that they hold, instead of rounding weights."""

    def __init__(self) -> None:
        super().__init__(per_channel=True, symmetric=True, reduce_range=False)
        self._quantized: dict[tuple[int, bytes, bytes, bool], Sequence[ir.Value]] = {}

    def _weight_key(self, layer: Layer) -> object:
        return tuple(constant_key(layer.node.inputs[place]) for place in (3, 4, 5))

    def _weight(self, layer: Layer) -> Int8Weight:
        weight, scale, zero = (_held(layer, place) for place in (3, 4, 5))
        return Int8Weight(np.ascontiguousarray(weight.T), scale, zero)

    def _static_activation(
        self, layer: Layer, ranges: Mapping[str, tuple[float, float]], signed: bool
    ) -> Sequence[ir.Value]:
        """What is read by several layers with the same scale is rounded once."""
        graph, source = root_graph(layer.node), layer.activation
        scale, zero = _held(layer, 1), _held(layer, 2)
        key = (id(source), scale.tobytes(), zero.tobytes(), zero.dtype == np.int8)
        if key not in self._quantized:
            base = f"{source.name}.{len(self._quantized)}"
            inputs = [
                source,
                add_initializer(graph, f"{base}.scale", scale),
                add_initializer(graph, f"{base}.zero_point", zero),
            ]
            quantize = ir.node("QuantizeLinear", inputs, name=f"{base}.quantize")
            insert_after(source, graph, [quantize])
            quantize.outputs[0].shape = source.shape
            quantize.outputs[0].type = ir.TensorType(ir.DataType.INT8 if zero.dtype == np.int8 else ir.DataType.UINT8)
            self._quantized[key] = (quantize.outputs[0], inputs[1], inputs[2])
        return self._quantized[key]


def _put_blocks(layer: Layer, stored: dict[object, BlockConstants]) -> None:
    """Put a `MatMulNBits` in a layer's place; layers with the same blocks share the constants in `stored`."""
    sizes = {name: layer.node.attributes.get_int(name, 0) for name in ("bits", "block_size", "inner")}
    packed, scales, zeros = (_held(layer, place) for place in (1, 2, 3))
    key = tuple(constant_key(layer.node.inputs[place]) for place in (1, 2, 3))
    if key not in stored:
        stored[key] = add_blocks(layer, packed, scales, zeros)
    put_blocks(
        layer, stored[key], inner=sizes["inner"], outer=len(packed), bits=sizes["bits"], block_size=sizes["block_size"],
        int8_activations=not _far_apart(layer, sizes["inner"]),
    )  # fmt: skip


def _far_apart(layer: Layer, inner: int) -> bool:
    """Whether a layer's inputs are multiplied by factors of very different sizes (AWQ behind a ReLU: 0.006 to 170): 8 bits for a
    block of such inputs leave nothing of the small ones (0.14 of the largest logit, where float32 has 4e-7).
    """
    node = layer.activation.producer()
    if node is None or node.op_type != "Mul":
        return False
    factors = [array for array in map(constant, node.inputs) if array is not None and array.shape == (inner,)]
    return any(np.abs(one).max() > _FACTORS_APART * np.abs(one).min() for one in factors)


def _held(layer: Layer, place: int) -> np.ndarray:
    """A constant that a quantized layer holds."""
    array = constant(layer.node.inputs[place])
    assert array is not None, f"input {place} of {layer.name} is no constant"
    return array
