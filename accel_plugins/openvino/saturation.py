"""8-bit products of graphs that were quantized for other processors, where this one adds them in 16 bits.

Such sums saturate at the full range of weights: silently, and by as much as the answer is large. What would be added so is computed in
floating point instead, with the same integers.
"""

from __future__ import annotations

import logging

import numpy as np
import openvino as ov
from openvino.passes import ConstantFolding, Manager

logger = logging.getLogger(__name__)

_INTEGERS = (ov.Type.i8, ov.Type.u8)
_PRODUCTS = ("MatMul", "Convolution", "GroupConvolution", "ConvolutionBackpropData", "GroupConvolutionBackpropData")
_LAYOUTS = ("Reshape", "Transpose", "Squeeze", "Unsqueeze")
# From -64 to 64: weights that keep 7 bits, as all quantizers here write them for such processors.
_NARROW = 128


def compute_in_float(model: ov.Model, name: str) -> None:
    """Turn weights of 8 bits beside quantized activations into floating-point constants, and leave one side of products of two
    activations as it is. Graphs whose weights keep 7 bits stay as they are, and weights beside activations that are not quantized.

    Args:
        model: Changed in place.
        name: What to call it in the warning.
    """
    nodes = model.get_ordered_ops()
    weights = [_weights_of(place) for node in nodes if node.get_type_name() in _PRODUCTS for place in node.inputs()]
    if not any(node.get_type_name() == "FakeQuantize" for node in nodes) or not any(map(_are_wide, weights)):
        return
    logger.warning(
        "%s was quantized for another processor, or by Neural Compressor for all: its 8-bit products would saturate here, and are "
        "computed in floating point. Quantize it for OpenVINO on this one for its full speed.", name,
    )  # fmt: skip
    for node in nodes:
        if node.get_type_name() != "MatMul" or _rounded(node.input(0)) is None:
            continue
        if (found := _rounded(node.input(1))) is not None:
            reader, source = found
            reader.replace_source_output(source)
    folding = Manager()
    folding.register_pass(ConstantFolding())
    folding.run_passes(model)


def _weights_of(place: ov.Input) -> ov.Node | None:
    """The integers that an input of a product is made of; `None` where it is computed. Tables that are looked up are no weights."""
    node = place.get_source_output().get_node()
    while node.get_type_name() in (*_LAYOUTS, "Convert", "Subtract", "Multiply"):
        node = node.input_value(0).get_node()
    return node if node.get_type_name() == "Constant" and node.get_element_type() in _INTEGERS else None


def _are_wide(weights: ov.Node | None) -> bool:
    """Whether weights have more than 7 bits."""
    if weights is None:
        return False
    values = weights.data
    return values.ndim > 1 and values.size > 0 and int(np.max(values)) - int(np.min(values)) > _NARROW


def _rounded(place: ov.Input) -> tuple[ov.Input, ov.Output] | None:
    """Where an input's activations were quantized: who reads them, and what they were before; `None` where they are none."""
    while True:
        node = place.get_source_output().get_node()
        quantized = _quantized_by(node)
        if quantized is not None:
            return place, quantized.input_value(0)
        # A product scales what was quantized, and stays.
        if node.get_type_name() not in (*_LAYOUTS, "Multiply"):
            return None
        place = node.input(0)


def _quantized_by(node: ov.Node) -> ov.Node | None:
    """The `FakeQuantize` that a node is, or with which it goes through whole numbers and back, as graphs from ONNX do."""
    if node.get_type_name() == "Multiply":
        node = node.input_value(0).get_node()
        if node.get_type_name() == "Subtract":
            node = node.input_value(0).get_node()
        if node.get_type_name() != "Convert":
            return None
        while node.get_type_name() == "Convert":
            node = node.input_value(0).get_node()
    return node if node.get_type_name() == "FakeQuantize" else None
