"""Correct results for int8 graphs on processors that add int8 products in 16 bits.

On these processors, the sums of products saturate without a message if weights use all 8 bits, as in graphs that were
quantized for other processors. The error can be as large as the largest value. The matrix products are therefore
computed in floating point, with the same quantized values.
"""

from __future__ import annotations

import logging

import numpy as np
import openvino as ov
from openvino.passes import ConstantFolding, Manager

logger = logging.getLogger(__name__)

_INTEGERS = (ov.Type.i8, ov.Type.u8)
PRODUCTS = ("MatMul", "Convolution", "GroupConvolution", "ConvolutionBackpropData", "GroupConvolutionBackpropData")
_LAYOUTS = ("Reshape", "Transpose", "Squeeze", "Unsqueeze")
# Width of the range of 7-bit weights, which is -64 to 64. The quantizers of `accel` write 7-bit weights for processors
# that add int8 products in 16 bits.
_NARROW = 128


def compute_in_float(model: ov.Model, name: str) -> None:
    """Compute quantized products in floating point if the graph has 8-bit weights.

    Int8 weights become floating-point constants. In products of two activations, only one input stays quantized. A graph with
    7-bit weights is not changed. Weights whose activations are not quantized stay as they are.

    Args:
        model: The graph; it is changed in place.
        name: Name of the graph for the warning.
    """
    nodes = model.get_ordered_ops()
    weights = [_weights_of(place) for node in nodes if node.get_type_name() in PRODUCTS for place in node.inputs()]
    if not any(node.get_type_name() == "FakeQuantize" for node in nodes) or not any(map(_are_wide, weights)):
        return
    logger.warning(
        "The model %s was quantized for a different processor, or by Neural Compressor for all processors. Its int8 products would "
        "overflow on this processor, so they are computed in floating point, which is slower. For full speed, quantize the model "
        "with OpenVINO on this machine.", name,
    )  # fmt: skip
    for node in nodes:
        if node.get_type_name() != "MatMul" or rounded(node.input(0)) is None:
            continue
        if (quantization := rounded(node.input(1))) is not None:
            reader, source = quantization
            reader.replace_source_output(source)
    folding = Manager()
    folding.register_pass(ConstantFolding())
    folding.run_passes(model)


def _weights_of(place: ov.Input) -> ov.Node | None:
    """Return the integer constant that an input of a product is computed from, or `None` if there is none."""
    node = place.get_source_output().get_node()
    while node.get_type_name() in (*_LAYOUTS, "Convert", "Subtract", "Multiply"):
        node = node.input_value(0).get_node()
    return node if node.get_type_name() == "Constant" and node.get_element_type() in _INTEGERS else None


def _are_wide(weights: ov.Node | None) -> bool:
    """Return whether weights use more than 7 bits."""
    if weights is None:
        return False
    values = weights.data
    return values.ndim > 1 and values.size > 0 and int(np.max(values)) - int(np.min(values)) > _NARROW


def rounded(place: ov.Input) -> tuple[ov.Input, ov.Output] | None:
    """Find the quantization of an input's activations.

    Returns:
        The node input that reads the quantized tensor, and the tensor before quantization; `None` if the input is not
        quantized.
    """
    while True:
        node = place.get_source_output().get_node()
        quantized = _quantized_by(node)
        if quantized is not None:
            return place, quantized.input_value(0)
        # A Multiply that scales the quantized values is kept; only the quantization before it is removed.
        if node.get_type_name() not in (*_LAYOUTS, "Multiply"):
            return None
        place = node.input(0)


def _quantized_by(node: ov.Node) -> ov.Node | None:
    """Return the `FakeQuantize` node that computes the output of a node, or `None` if the output is not quantized.

    In graphs from ONNX, the output of `FakeQuantize` is also converted to integers and back.
    """
    if node.get_type_name() == "Multiply":
        node = node.input_value(0).get_node()
        if node.get_type_name() == "Subtract":
            node = node.input_value(0).get_node()
        if node.get_type_name() != "Convert":
            return None
        while node.get_type_name() == "Convert":
            node = node.input_value(0).get_node()
    return node if node.get_type_name() == "FakeQuantize" else None
