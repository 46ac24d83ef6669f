"""Repairs of traced graphs, where torch.onnx or onnxscript rewrote them into graphs that do not compute exactly the same."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir

# What ONNX Runtime's CPU provider (1.31) has no bfloat16 kernels for.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div")
# A size that may be further below 0 is not moved above it: OpenVINO's integers are exact up to 2**24 where they are divided.
_FARTHEST = 2**20


def round_to_bfloat16(model: onnx_ir.Model) -> None:
    """Compute sums and products of bfloat16 in float32 and round them, which is what PyTorch does: the same numbers.

    Falcon's and BLOOM's positions are bfloat16 in models of any type.
    """
    import onnx_ir

    for graph in model.graphs():
        for node in [node for node in graph if node.op_type in _ARITHMETIC and node.domain == ""]:
            result = node.outputs[0]
            if result.dtype != onnx_ir.DataType.BFLOAT16:
                continue
            wide = [
                onnx_ir.node("Cast", [value], {"to": onnx_ir.DataType.FLOAT}, name=f"{result.name}_wide_{i}")
                for i, value in enumerate(node.inputs)
            ]
            for cast, value in zip(wide, node.inputs, strict=True):
                cast.outputs[0].dtype = onnx_ir.DataType.FLOAT
                cast.outputs[0].shape = value.shape if value is not None else None
                cast.outputs[0].name = cast.name
            graph.insert_before(node, wide)
            for i, cast in enumerate(wide):
                node.replace_input_with(i, cast.outputs[0])
            back = onnx_ir.node("Cast", [result], {"to": onnx_ir.DataType.BFLOAT16}, name=f"{result.name}_rounded")
            rounded = back.outputs[0]
            rounded.name, rounded.dtype, rounded.shape = back.name, onnx_ir.DataType.BFLOAT16, result.shape
            result.replace_all_uses_with(rounded)
            back.replace_input_with(0, result)
            graph.insert_after(node, back)
            result.dtype = onnx_ir.DataType.FLOAT


def keep_padding(model: onnx_ir.Model) -> None:
    """Let images that are padded before the largest of a window is taken keep their padding, whose zeros may be the largest (BiT).

    ONNX Runtime (1.31) moves the padding into `MaxPool`, which passes over it. It leaves a `Pad` alone that names its axes.
    """
    import onnx_ir

    for graph in model.graphs():
        for node in [node for node in graph if node.op_type == "Pad" and node.domain == "" and len(node.inputs) < 4]:
            users = [use.node for use in node.outputs[0].uses()]
            # In half precision a cast may stand between.
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
    """Divide sizes of axes by integer division alone, rounded down as in Python.

    The exporter writes `size // n` as a quotient that is corrected where a negative number has a remainder. ONNX Runtime's CUDA provider
    (1.31) reads 0 there, now and then. What a number is computed from says how small and how large it may be: one that is never
    negative is divided, one that never is above 0 is divided as its opposite, and one that may be a little below 0 is moved above
    it and its quotient back. Others stay as they are.
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
        found = size
        for operator, operand in steps:
            constant = onnx_ir.node("Constant", [], {"value": onnx_ir.tensor(operand, dtype=onnx_ir.DataType.INT64)})
            # The next division, of what comes of this one, asks for it.
            constant.outputs[0].const_value = constant.attributes["value"].as_tensor()
            step = onnx_ir.node(operator, [found, constant.outputs[0]])
            found = step.outputs[0]
            found.dtype, found.shape = onnx_ir.DataType.INT64, result.shape
            model.graph.insert_before(node, [constant, step])
        result.replace_all_uses_with(found)
        replaced = True
    if replaced:
        RemoveUnusedNodesPass()(model)


def _made_by(value: onnx_ir.Value | None, operator: str) -> onnx_ir.Node | None:
    """The node that makes a value, if it is such an operator."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == operator else None


def _number(value: onnx_ir.Value | None) -> int | None:
    """The whole number that a value always is."""
    known = None if value is None else value.const_value
    if known is None or known.size != 1 or not known.dtype.is_integer():
        return None
    return int(known.numpy().item())


def _bounds(value: onnx_ir.Value | None) -> tuple[float, float] | None:
    """The least and the largest that a value computed from sizes of axes and whole numbers alone may be, else `None`."""
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
    one, other = _bounds(node.inputs[0]), _bounds(node.inputs[1])
    if one is None or other is None:
        return None
    if node.op_type == "Add":
        return one[0] + other[0], one[1] + other[1]
    if node.op_type == "Sub":
        return one[0] - other[1], one[1] - other[0]
    if node.op_type == "Mul":
        # A size of 0 times any number is 0.
        every = [a * b if a and b else 0 for a in one for b in other]
        return min(every), max(every)
    if other[0] != other[1] or other[0] <= 0:
        return None
    # Integers are rounded towards 0.
    least, most = (bound if math.isinf(bound) else math.trunc(bound / other[0]) for bound in one)
    return least, most
