"""Floor division of integers: negative quotients are rounded down, as in Python and PyTorch."""

from __future__ import annotations

import openvino as ov
import openvino.opset13 as operators


def divide_down(model: ov.Model) -> None:
    """Fix floor division of integers in a graph, so that -1 divided by 8 is -1. Some models divide the index -1, which
    they use for a point without a match.

    OpenVINO's converter emits the floor of a quotient, but OpenVINO (2026.4) first rounds integer quotients towards
    zero.
    """
    for node in model.get_ops():
        if node.get_type_name() != "Floor" or not node.get_element_type().is_integral_number():
            continue
        quotient = node.input_value(0).get_node()
        if quotient.get_type_name() != "Divide":
            continue
        number, divisor = quotient.input_values()
        multiple = operators.subtract(number, operators.floor_mod(number, divisor))
        node.output(0).replace(operators.divide(multiple, divisor).output(0))
    model.validate_nodes_and_infer_types()
