"""Static analysis of graph values: producers and readers, axis sizes, shapes computed from axis sizes, and value bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .editing import constant, is_constant, scalar

Dim = int | str | tuple[int, int]
"""An axis size: a number, an axis name, or, if the graph has neither, a pair of (id of the value, axis)."""
_DEPTH = 24


def dims(value: ir.Value | None) -> list[Dim] | None:
    """Return the axis sizes of a value as numbers or axis names; `None` if the rank is unknown.

    Two axes with equal entries have the same size.
    """
    if value is None or value.shape is None:
        return None
    sizes: list[Dim] = []
    for axis, dim in enumerate(value.shape):
        name = None if isinstance(dim, int) else dim.value
        sizes.append(dim if isinstance(dim, int) else str(name) if name is not None else (id(value), axis))
    return sizes


def producer(value: ir.Value | None, operator: str, domain: str = "") -> ir.Node | None:
    """Return the node that produces a value if it has this operator type and domain, else `None`."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != operator or node.domain != domain:
        return None
    return node


def unwrapped(value: ir.Value | None, *operators: str) -> ir.Value | None:
    """Return the value from which operators of these types computed `value`, following the first input of each operator."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in operators or not node.inputs:
            break
        value = node.inputs[0]
    return value


def only_user(value: ir.Value | None) -> ir.Node | None:
    """Return the node that reads a value if it has exactly one use and is not a graph output, else `None`."""
    if value is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    return value.uses()[0].node


def constant_term(node: ir.Node | None) -> tuple[ir.Value, ir.Value] | None:
    """Return (other operand, vector) if one operand of a node is a constant vector, for example a bias; else `None`."""
    if node is None:
        return None
    for value, vector in (node.inputs, reversed(node.inputs)):
        if value is not None and is_constant(vector) and len(dims(vector) or ()) == 1:
            assert vector is not None
            return value, vector
    return None


def unscaled(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """Return the value before all multiplications and divisions by constants, and the product of the constants."""
    factor = 1.0
    while value is not None:
        node = value.producer()
        if node is None or node.op_type not in ("Mul", "Div") or node.domain:
            break
        right, left = scalar(node.inputs[1]), scalar(node.inputs[0]) if node.op_type == "Mul" else None
        if right is not None:
            factor = factor * right if node.op_type == "Mul" else factor / right
            value = node.inputs[0]
        elif left is not None:
            factor *= left
            value = node.inputs[1]
        else:
            break
    return value, factor


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer in a graph: `x @ weight + bias`, where `weight` is `(inner, outer)` and `bias` is `(outer,)` or `None`."""

    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None


def linear(value: ir.Value | None) -> Linear | None:
    """Return the linear layer that produces a value: a product with a constant matrix and an optional constant bias.

    Return `None` if the value is not the result of a linear layer.
    """
    product, bias = value, None
    term = constant_term(producer(value, "Add"))
    if term is not None:
        product, bias = term
    node = producer(product, "MatMul")
    if (
        node is None
        or node.inputs[0] is None
        or not is_constant(node.inputs[1])
        or len(dims(node.inputs[1]) or ()) != 2
    ):
        return None
    return Linear(node.inputs[0], node.inputs[1], bias)


Split = tuple[ir.Value, int, int]
"""A tuple of the value `(batch, length, heads * depth)` before it is split into heads, the number of heads, and the head size."""


def split_heads(value: ir.Value | None) -> Split | None:
    """Return the value before its split into heads `(batch, heads, length, depth)`; `None` if there was no split."""
    transpose = producer(value, "Transpose")
    if transpose is None or list(transpose.attributes.get_ints("perm", [])) != [0, 2, 1, 3]:
        return None
    return reshaped_heads(transpose.inputs[0])


def reshaped_heads(value: ir.Value | None) -> Split | None:
    """Return the value before its reshape to `(batch, length, heads, depth)`; `None` if there was no reshape."""
    reshape = producer(value, "Reshape")
    if reshape is None or reshape.inputs[0] is None:
        return None
    flat, split = dims(reshape.inputs[0]), dims(value)
    if flat is None or split is None or len(flat) != 3 or len(split) != 4 or flat[:2] != split[:2]:
        return None
    heads, depth = split[2:]
    if not isinstance(heads, int) or not isinstance(depth, int) or flat[2] != heads * depth:
        return None
    return reshape.inputs[0], heads, depth


def made_by_name(graph: ir.Graph, name: str) -> ir.Value | None:
    """Return the node output with this name in the graph, else `None`."""
    return next((output for node in graph for output in node.outputs if output.name == name), None)


def readers(value: ir.Value | None) -> list[ir.Node]:
    """Return the nodes that read a value, one entry for each use; an empty list for `None`."""
    return [use.node for use in value.uses()] if value is not None else []


def shape_value(value: ir.Value | None, depth: int = _DEPTH) -> list[Dim] | None:
    """Return the elements of an integer vector or scalar as numbers and axis names.

    Return `None` if the value is computed from anything other than axis sizes and constants.
    """
    if value is None or depth == 0:
        return None
    array = constant(value)
    if array is not None:
        return [int(item) for item in array.reshape(-1)] if array.size <= 16 and array.dtype.kind in "iu" else None
    node = value.producer()
    if node is None or node.domain:
        return None
    match node.op_type:
        case "Shape":
            sizes = dims(node.inputs[0])
            if sizes is None:
                return None
            end = node.attributes.get_int("end", len(sizes))
            return sizes[node.attributes.get_int("start", 0) : end]
        case "Concat":
            parts = [shape_value(item, depth - 1) for item in node.inputs]
            return None if any(part is None for part in parts) else [item for part in parts for item in part or ()]
        case "Squeeze" | "Unsqueeze" | "Identity":
            items = shape_value(node.inputs[0], depth - 1)
            return items if items is not None and (len(items) == 1 or node.op_type == "Identity") else None
        case "Slice":
            return _sliced(node, depth)
        case "Gather":
            items, index = shape_value(node.inputs[0], depth - 1), constant(node.inputs[1])
            return [items[int(i)] for i in index.reshape(-1)] if items is not None and index is not None else None
        case _:
            return None


def _sliced(node: ir.Node, depth: int) -> list[Dim] | None:
    items = shape_value(node.inputs[0], depth - 1)
    bounds_ = [scalar(item) for item in node.inputs[1:3]]
    step = scalar(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else 1
    if items is None or bounds_[0] is None or bounds_[1] is None or step != 1:
        return None
    length = len(items)
    start, end = (max(-length, min(length, int(item))) for item in bounds_ if item is not None)
    return items[start if start >= 0 else start + length : end if end >= 0 else end + length]


def bounds(value: ir.Value | None, depth: int = _DEPTH) -> tuple[float, float]:
    """Return the smallest and the largest element that a value can have; booleans count as 0 and 1."""
    everything = (-math.inf, math.inf)
    if value is None or depth == 0:
        return everything
    array = constant(value)
    if array is not None:
        if array.size == 0 or array.dtype.kind not in "iufb":
            return everything
        return float(array.min()), float(array.max())
    is_bool = value.dtype == ir.DataType.BOOL
    node = value.producer()
    limits = _node_bounds(node, depth) if node is not None and not node.domain else everything
    return (max(limits[0], 0.0), min(limits[1], 1.0)) if is_bool else limits


def _node_bounds(node: ir.Node, depth: int) -> tuple[float, float]:
    everything = (-math.inf, math.inf)

    def of(index: int) -> tuple[float, float]:
        return bounds(node.inputs[index], depth - 1)

    match node.op_type:
        case "Unsqueeze" | "Squeeze" | "Reshape" | "Expand" | "Identity" | "Transpose" | "Slice" | "Gather":
            return of(0)
        case "Cast":
            low, high = of(0)
            if node.outputs[0].dtype == ir.DataType.BOOL:
                return (1.0, 1.0) if low > 0 or high < 0 else (0.0, 0.0) if low == high == 0 else (0.0, 1.0)
            return low, high
        case "Range":
            step, start = scalar(node.inputs[2]), of(0)
            return (start[0], math.inf) if step is not None and step > 0 else everything
        case "Shape" | "Size":
            return 0.0, math.inf
        case "Not":
            low, high = of(0)
            return 1 - high, 1 - low
        case "And" | "Or":
            (a, b), (c, d) = of(0), of(1)
            return (min(a, c), min(b, d)) if node.op_type == "And" else (max(a, c), max(b, d))
        case "GreaterOrEqual" | "Greater" | "LessOrEqual" | "Less":
            return _comparison(node.op_type, of(0), of(1))
        case "Mul":
            (a, b), (c, d) = of(0), of(1)
            products = [x * y for x in (a, b) for y in (c, d)]
            return everything if any(math.isnan(p) for p in products) else (min(products), max(products))
        case "ReduceSum":
            return _reduced(node, of(0))
        case _:
            return everything


def _comparison(operator: str, left: tuple[float, float], right: tuple[float, float]) -> tuple[float, float]:
    if operator.startswith("Less"):
        left, right = right, left
    strict = not operator.endswith("OrEqual")
    if left[0] > right[1] or (left[0] == right[1] and not strict):
        return 1.0, 1.0
    if left[1] < right[0] or (left[1] == right[0] and strict):
        return 0.0, 0.0
    return 0.0, 1.0


def _reduced(node: ir.Node, item: tuple[float, float]) -> tuple[float, float]:
    """Return the bounds of a sum over axes, from the bounds of an item; an axis of unknown size has at least one item."""
    sizes = dims(node.inputs[0])
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if sizes is None or axes is None:
        return -math.inf, math.inf
    counts = [sizes[int(axis)] for axis in np.atleast_1d(axes)]
    if all(isinstance(count, int) for count in counts):
        total = math.prod(count for count in counts if isinstance(count, int))
        return item[0] * total, item[1] * total
    # The number of items is unknown but at least 1: a sum of items that are at least 2, for example, is at least 2.
    low = item[0] if item[0] >= 0 else -math.inf
    high = item[1] if item[1] <= 0 else math.inf
    return low, high
