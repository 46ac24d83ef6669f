"""Padding masks of attention: read from what `torch.export` writes, and written once for fused operators.

A condition over (query, key) says nothing but which keys are padding when every query sees the same ones. The operators then
take the `(batch, sequence)` mask behind it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..graph.analysis import bounds, dims, made_by_name, producer
from ..graph.editing import INTEGERS, add_initializer, constant, insert_after, scalar

MASK_NAME = "accel.key_mask"
"""Name of the `(batch, sequence) int32` value that fused attention takes its mask from; sessions that give a graph other forms
find it by this."""
ROWS_NAME = "accel.rows_with_keys"
"""Name of the `(batch, 1, 1) bool` value that is false for rows without any key."""


# Reading


def keep_condition(term: ir.Value) -> tuple[ir.Value | None, float]:
    """The truth value of an additive mask that is 0 where it holds and a large negative number elsewhere; that number.

    `(1 - mask) * number` counts as such a mask too: a padding mask of 0 and 1 is its own truth value.
    """
    choice = producer(term, "Where")
    if choice is not None:
        low = _low(choice.inputs[2])
        return (choice.inputs[0], low) if scalar(choice.inputs[1]) == 0.0 and low < 0 else (None, 0.0)
    product = producer(term, "Mul")
    if product is None:
        return None, 0.0
    for one, other in ((0, 1), (1, 0)):
        cast = producer(product.inputs[one], "Cast")
        negation = producer(cast.inputs[0], "Not") if cast is not None else None
        low = _low(product.inputs[other])
        if negation is not None and low < 0:
            return negation.inputs[0], low
        difference = producer(product.inputs[one], "Sub")
        if difference is not None and low < 0 and scalar(difference.inputs[0]) == 1.0:
            mask = producer(difference.inputs[1], "Cast")
            if mask is not None and mask.inputs[0] is not None and mask.inputs[0].dtype in INTEGERS:
                return mask.inputs[0], low
    return None, 0.0


def _low(value: ir.Value | None) -> float:
    """The value when it is a constant that stands for minus infinity, else 0."""
    number = scalar(value)
    return number if number is not None and number <= -1e4 else 0.0


def padding_source(keep: ir.Value) -> ir.Value | None:
    """The `(batch, sequence)` value whose non-zero entries are the keys kept, when the condition says just that.

    Entry `[b, 0, q, k]` of the condition is then `source[b, k]`, for every query.
    """
    both = producer(keep, "And")
    if both is not None:
        certain = [bounds(item) == (1.0, 1.0) for item in both.inputs]
        if certain == [True, False]:
            return padding_source(both.inputs[1]) if both.inputs[1] is not None else None
        if certain == [False, True]:
            return padding_source(both.inputs[0]) if both.inputs[0] is not None else None
        return None
    for operator in ("Expand", "Unsqueeze"):
        node = producer(keep, operator)
        # Only ever as (batch, 1, 1, sequence): the key is the last axis.
        if node is not None and node.inputs[0] is not None and _key_shaped(keep, node.inputs[0], operator):
            return padding_source(node.inputs[0])
    gather = producer(keep, "GatherND")
    if gather is not None:
        if gather.attributes.get_int("batch_dims", 0) or not _addresses_keys(gather.inputs[1]):
            return None
        return _truth(gather.inputs[0])
    sizes = dims(keep)
    return _truth(keep) if sizes is not None and len(sizes) == 2 else None


def _key_shaped(value: ir.Value, source: ir.Value, operator: str) -> bool:
    have, want = dims(source), dims(value)
    if have is None or want is None or len(want) != 4:
        return False
    if operator == "Expand":
        return len(have) == 4 and have[0] == want[0] and have[3] == want[3] and have[1] == have[2] == 1
    return len(have) == 2 and want == [have[0], 1, 1, have[1]]


def _truth(value: ir.Value | None) -> ir.Value | None:
    """What a `(batch, sequence)` truth value was cast from; a mask of integers is one itself."""
    sizes = dims(value)
    if value is None or sizes is None or len(sizes) != 2:
        return None
    cast = producer(value, "Cast")
    if cast is not None and value.dtype == ir.DataType.BOOL:
        return cast.inputs[0]
    return value if value.dtype == ir.DataType.BOOL or value.dtype in INTEGERS else None


def _addresses_keys(indices: ir.Value | None) -> bool:
    """Whether indices of shape `(batch, 1, 1, sequence, 2)` are just (row, key)."""
    concat = producer(indices, "Concat")
    if concat is None or len(concat.inputs) != 2 or concat.attributes.get_int("axis", 0) not in (-1, 4):
        return False
    for item, axis in zip(concat.inputs, (0, 3), strict=True):
        unsqueeze = producer(item, "Unsqueeze")
        expand = producer(unsqueeze.inputs[0], "Expand") if unsqueeze is not None else None
        if expand is None:
            return False
        counted = expand.inputs[0]
        sizes = dims(counted)
        if sizes is None or len(sizes) != 4 or any(size != 1 for i, size in enumerate(sizes) if i != axis):
            return False
        while (node := producer(counted, "Unsqueeze")) is not None:
            counted = node.inputs[0]
        counting = producer(counted, "Range")
        if counting is None or scalar(counting.inputs[0]) != 0.0 or scalar(counting.inputs[2]) != 1.0:
            return False
    return True


def counted_condition(empty: ir.Value) -> ir.Value | None:
    """The condition of which a row holds none: `sum(cast(condition)) < 1`."""
    less = producer(empty, "Less")
    if less is None or scalar(less.inputs[1]) != 1.0:
        return None
    total = producer(less.inputs[0], "ReduceSum")
    axes = constant(total.inputs[1]) if total is not None and len(total.inputs) > 1 else None
    if total is None or axes is None or axes.reshape(-1).tolist() not in ([-1], [3]):
        return None
    cast = producer(total.inputs[0], "Cast")
    return cast.inputs[0] if cast is not None else None


# Writing


def key_mask(source: ir.Value, graph: ir.Graph) -> ir.Value:
    """1 for the keys kept and 0 for the others, once for the whole graph: `(batch, sequence) int32`."""
    found = made_by_name(graph, MASK_NAME)
    if found is not None:
        return found
    kept = ir.node("Cast", [source], {"to": ir.DataType.BOOL}, name=f"{MASK_NAME}.kept")
    mask = ir.node("Cast", [kept.outputs[0]], {"to": ir.DataType.INT32}, name=MASK_NAME)
    kept.outputs[0].type, kept.outputs[0].shape = ir.TensorType(ir.DataType.BOOL), source.shape
    mask.outputs[0].name = MASK_NAME
    mask.outputs[0].type, mask.outputs[0].shape = ir.TensorType(ir.DataType.INT32), source.shape
    insert_after(source, graph, [kept, mask])
    return mask.outputs[0]


def rows_with_keys(source: ir.Value, graph: ir.Graph) -> ir.Value:
    """Whether a row keeps any key, once for the whole graph: `(batch, 1, 1) bool`."""
    found = made_by_name(graph, ROWS_NAME)
    if found is not None:
        return found
    mask = key_mask(source, graph)
    axis = add_initializer(graph, "accel.axis_1", np.array([1], np.int64))
    total = ir.node("ReduceMax", [mask, axis], {"keepdims": 1}, name=f"{ROWS_NAME}.any")
    truth = ir.node("Cast", [total.outputs[0]], {"to": ir.DataType.BOOL}, name=f"{ROWS_NAME}.truth")
    last = add_initializer(graph, "accel.axis_2", np.array([2], np.int64))
    rows = ir.node("Unsqueeze", [truth.outputs[0], last], name=ROWS_NAME)
    rows.outputs[0].name = ROWS_NAME
    sizes = mask.shape
    assert sizes is not None
    total.outputs[0].type = ir.TensorType(ir.DataType.INT32)
    truth.outputs[0].type = rows.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
    total.outputs[0].shape = truth.outputs[0].shape = ir.Shape([sizes[0], 1])
    rows.outputs[0].shape = ir.Shape([sizes[0], 1, 1])
    insert_after(mask, graph, [total, truth, rows])
    return rows.outputs[0]
