"""Repairs of exported ONNX graphs in which torch.onnx, onnxscript or a runtime does not compute exactly what PyTorch computes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir

# Arithmetic operators for which ONNX Runtime's CPU provider (1.31) has no bfloat16 kernels.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div")
# Sizes below this negative limit are not repaired, because OpenVINO's integer division is exact only up to 2**24.
_FARTHEST = 2**20


def round_to_bfloat16(model: onnx_ir.Model) -> None:
    """Replace bfloat16 arithmetic by float32 arithmetic whose result is rounded to bfloat16. The results are identical in PyTorch.

    Falcon and BLOOM compute positions in bfloat16, independent of the data type of the model.
    """
    import onnx_ir

    for graph in model.graphs():
        for node in [node for node in graph if node.op_type in _ARITHMETIC and node.domain == ""]:
            result = node.outputs[0]
            if result.dtype != onnx_ir.DataType.BFLOAT16:
                continue
            tape = onnx_ir.tape.Tape()
            operands = [tape.op("Cast", [value], {"to": onnx_ir.DataType.FLOAT}) for value in node.inputs]
            exact = tape.op(node.op_type, operands)
            for value, like in zip((*operands, exact), (*node.inputs, result), strict=True):
                value.dtype, value.shape = onnx_ir.DataType.FLOAT, like.shape if like is not None else None
            rounded = tape.op("Cast", [exact], {"to": onnx_ir.DataType.BFLOAT16})
            onnx_ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, [result], [rounded])


def keep_padding(model: onnx_ir.Model) -> None:
    """Prevent ONNX Runtime from merging a `Pad` node into a following `MaxPool` node.

    `MaxPool` ignores padding, but in BiT a zero of the padding may be the largest value. ONNX Runtime (1.31) merges only `Pad` nodes
    without the input `axes`, so this function adds this input.
    """
    import onnx_ir

    for graph in model.graphs():
        for node in [node for node in graph if node.op_type == "Pad" and node.domain == "" and len(node.inputs) < 4]:
            users = [use.node for use in node.outputs[0].uses()]
            # In half-precision graphs, there may be a Cast node between Pad and MaxPool.
            users += [use.node for user in users if user.op_type == "Cast" for use in user.outputs[0].uses()]
            widths = node.inputs[1].const_value if node.inputs[1] is not None else None
            if widths is None or not any(user.op_type == "MaxPool" for user in users):
                continue
            axes = onnx_ir.node(
                "Constant", [], {"value_ints": list(range(widths.size // 2))}, name=f"{node.outputs[0].name}_axes"
            )
            axes.outputs[0].name = axes.name
            graph.insert_before(node, axes)
            node.resize_inputs(4)
            node.replace_input_with(3, axes.outputs[0])


def divide_sizes(model: onnx_ir.Model) -> None:
    """Replace the exporter's floor division of axis sizes by integer division, without a correction for negative sizes.

    The exporter writes `size // n` as a quotient minus a correction for negative sizes. ONNX Runtime's CUDA provider (1.31) sometimes
    reads the size 0 in the correction. This function computes bounds of each size from the nodes that compute the size. A size that is
    never negative is divided directly. A size that is never above 0 is negated before and after the division. A size that may be
    slightly below 0 is increased by a multiple of n before the division, and the quotient is decreased accordingly. Other divisions
    are not changed.
    """
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    replaced = False
    for node in [node for node in model.graph if node.op_type == "Sub" and node.domain == ""]:
        quotient, correction = _made_by(node.inputs[0], "Div"), _made_by(node.inputs[1], "Cast")
        if quotient is None or correction is None or _made_by(correction.inputs[0], "And") is None:
            continue
        (size, divisor), result = quotient.inputs, node.outputs[0]
        number, bounds = _number(divisor), _bounds(size)
        if number is None or number <= 0 or bounds is None or result.is_graph_output():
            continue
        least, most = bounds
        steps: list[tuple[str, int]]
        if least >= 0:
            steps = [("Div", number)]
        elif most <= 0:
            steps = [("Mul", -1), ("Add", number - 1), ("Div", number), ("Mul", -1)]
        elif least >= -_FARTHEST:
            moved = math.ceil(-least / number)
            steps = [("Add", moved * number), ("Div", number), ("Sub", moved)]
        else:
            continue
        last_value = size
        for operator, operand in steps:
            constant = onnx_ir.node("Constant", [], {"value": onnx_ir.tensor(operand, dtype=onnx_ir.DataType.INT64)})
            # `_bounds` reads this value if the result is divided again.
            constant.outputs[0].const_value = constant.attributes["value"].as_tensor()
            step = onnx_ir.node(operator, [last_value, constant.outputs[0]])
            last_value = step.outputs[0]
            last_value.dtype, last_value.shape = onnx_ir.DataType.INT64, result.shape
            model.graph.insert_before(node, [constant, step])
        result.replace_all_uses_with(last_value)
        replaced = True
    if replaced:
        RemoveUnusedNodesPass()(model)


def _made_by(value: onnx_ir.Value | None, operator: str) -> onnx_ir.Node | None:
    """Return the node that computes a value, or `None` if the node has another operator type."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == operator else None


def _number(value: onnx_ir.Value | None) -> int | None:
    """Return the constant integer of a value, or `None`."""
    constant = None if value is None else value.const_value
    if constant is None or constant.size != 1 or not constant.dtype.is_integer():
        return None
    return int(constant.numpy().item())


def _bounds(value: onnx_ir.Value | None) -> tuple[float, float] | None:
    """Return the lower and upper bound of a value, or `None` if the value is not computed only from axis sizes and integers."""
    number = _number(value)
    if number is not None:
        return number, number
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "Shape":
        return 0, math.inf
    if node.op_type in ("Cast", "Gather", "Squeeze"):
        return _bounds(node.inputs[0])
    if node.op_type not in _ARITHMETIC:
        return None
    left, right = _bounds(node.inputs[0]), _bounds(node.inputs[1])
    if left is None or right is None:
        return None
    if node.op_type == "Add":
        return left[0] + right[0], left[1] + right[1]
    if node.op_type == "Sub":
        return left[0] - right[1], left[1] - right[0]
    if node.op_type == "Mul":
        # In Python 0 * inf is NaN, but the product of the size 0 and any number is 0.
        every = [a * b if a and b else 0 for a in left for b in right]
        return min(every), max(every)
    if right[0] != right[1] or right[0] <= 0:
        return None
    # ONNX's integer division rounds towards 0, so the bounds are truncated.
    least, most = (bound if math.isinf(bound) else math.trunc(bound / right[0]) for bound in left)
    return least, most
