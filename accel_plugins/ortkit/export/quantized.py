"""Conversion of quantized PyTorch layers to ONNX operators.

`accel_layers::integer_linear` becomes Q/DQ pairs and `accel_layers::block_linear` becomes `MatMulNBits`. The integers,
scales and zero points of the model are stored unchanged, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.capture import BLOCK_LINEAR, INTEGER_LINEAR, OPERATOR_DOMAIN

from ..graph.editing import MICROSOFT, constant, layer_name
from ..quantization.integer import IntegerRewriter
from ..quantization.integer_weights import Int8Weight
from ..quantization.layers import QuantizableLayer, constant_key
from ..quantization.weight_only import BlockConstants, add_blocks, put_blocks

_FACTORS_APART = 8


def lower_quantized_layers(model: ir.Model) -> int:
    """Replace every quantized layer of the graph by operators that runtimes support.

    Args:
        model: The model; changed in place.

    Returns:
        The number of replaced layers.
    """
    quantized = [node for node in model.graph if node.domain == OPERATOR_DOMAIN]
    integers = [QuantizableLayer(node, layer_name(node)) for node in quantized if node.op_type == INTEGER_LINEAR]
    blocks = [QuantizableLayer(node, layer_name(node)) for node in quantized if node.op_type == BLOCK_LINEAR]
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


class _StoredIntegers(IntegerRewriter):
    """Rewriter that uses the integers that the quantized layers already contain, so it does not round weights again."""

    def _weight_key(self, layer: QuantizableLayer) -> object:
        return tuple(constant_key(layer.node.inputs[place]) for place in (3, 4, 5))

    def _weight(self, layer: QuantizableLayer) -> Int8Weight:
        weight, scale, zero = (_constant_input(layer, place) for place in (3, 4, 5))
        return Int8Weight(np.ascontiguousarray(weight.T), scale, zero)

    def _static_activation(
        self, layer: QuantizableLayer, ranges: Mapping[str, tuple[float, float]], signed: bool
    ) -> Sequence[ir.Value]:
        return self._rounded(layer, _constant_input(layer, 1), _constant_input(layer, 2))


def _put_blocks(layer: QuantizableLayer, stored: dict[object, BlockConstants]) -> None:
    """Replace a layer by `MatMulNBits`; layers with the same quantized weight share the constants in `stored`."""
    sizes = {name: layer.node.attributes.get_int(name, 0) for name in ("bits", "block_size", "inner")}
    packed, scales, zeros = (_constant_input(layer, place) for place in (1, 2, 3))
    key = tuple(constant_key(layer.node.inputs[place]) for place in (1, 2, 3))
    if key not in stored:
        stored[key] = add_blocks(layer, packed, scales, zeros)
    put_blocks(
        layer, stored[key], inner=sizes["inner"], outer=len(packed), bits=sizes["bits"], block_size=sizes["block_size"],
        int8_activations=not _far_apart(layer, sizes["inner"]),
    )  # fmt: skip


def _far_apart(layer: QuantizableLayer, inner: int) -> bool:
    """Return whether the graph multiplies a layer's inputs by factors of very different sizes.

    AWQ adds such factors, for example 0.006 to 170 after a ReLU. If a kernel rounds one block of the multiplied inputs
    to 8 bits, the small inputs are lost: the error is 0.14 of the largest logit, compared with 4e-7 in float32.
    """
    node = layer.activation.producer()
    if node is None or node.op_type != "Mul":
        return False
    factors = [array for array in map(constant, node.inputs) if array is not None and array.shape == (inner,)]
    return any(np.abs(factor).max() > _FACTORS_APART * np.abs(factor).min() for factor in factors)


def _constant_input(layer: QuantizableLayer, place: int) -> np.ndarray:
    """Return the constant at an input of a quantized layer."""
    array = constant(layer.node.inputs[place])
    assert array is not None, f"input {place} of {layer.name} is no constant"
    return array
