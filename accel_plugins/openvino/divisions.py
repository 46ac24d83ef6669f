"""Division of whole numbers rounded down, as Python and PyTorch do it, where a quotient is below 0."""

from __future__ import annotations

import openvino as ov
import openvino.opset13 as operators


def divide_down(model: ov.Model) -> None:
    """Let quotients of whole numbers that PyTorch rounds down be rounded down: -1 by 8 is -1, as the place of a point that has no match.

    OpenVINO's converter writes them as the floor of a quotient, which of whole numbers (OpenVINO 2026.4) is rounded to zero before.
    """
    for node in model.get_ops():
        if node.get_type_name() != "Floor" or not node.get_element_type().is_integral_number():
            continue
        quotient = node.input_value(0).get_node()
        if quotient.get_type_name() != "Divide":
            continue
        number, divisor = quotient.input_values()
        whole = operators.subtract(number, operators.floor_mod(number, divisor))
        node.output(0).replace(operators.divide(whole, divisor).output(0))
    model.validate_nodes_and_infer_types()
