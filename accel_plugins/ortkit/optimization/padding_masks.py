"""Padding masks of attention: detection in the graphs of `torch.export`, and one shared mask for fused operators.

A condition over (query, key) is a padding mask if every query sees the same keys. Fused operators take the
`(batch, sequence)` mask that the condition was computed from.
"""

from __future__ import annotations

import onnx_ir as ir

from ..graph.analysis import bounds, dims, made_by_name, producer
from ..graph.editing import INTEGERS, NewNodes, constant, insert_after, scalar

MASK_NAME = "accel.key_mask"
"""Name of the `(batch, sequence) int32` value that fused attention uses as mask. Sessions that rewrite graphs find the
mask by this name.
"""
ROWS_NAME = "accel.rows_with_keys"
"""Name of the `(batch, 1, 1) bool` value that is false for batch rows in which every key is masked."""


# The following functions detect padding masks.


def keep_condition(term: ir.Value) -> tuple[ir.Value | None, float]:
    """Return the condition of an additive mask, and the large negative number added where the condition is false.

    A term `(1 - mask) * number` also matches; the condition is then the integer mask of 0 and 1. For other terms,
    return `(None, 0.0)`.
    """
    choice = producer(term, "Where")
    if choice is not None:
        low = _low(choice.inputs[2])
        return (choice.inputs[0], low) if scalar(choice.inputs[1]) == 0.0 and low < 0 else (None, 0.0)
    product = producer(term, "Mul")
    if product is None:
        return None, 0.0
    for left, right in ((0, 1), (1, 0)):
        cast = producer(product.inputs[left], "Cast")
        negation = producer(cast.inputs[0], "Not") if cast is not None else None
        low = _low(product.inputs[right])
        if negation is not None and low < 0:
            return negation.inputs[0], low
        difference = producer(product.inputs[left], "Sub")
        if difference is not None and low < 0 and scalar(difference.inputs[0]) == 1.0:
            mask = producer(difference.inputs[1], "Cast")
            if mask is not None and mask.inputs[0] is not None and mask.inputs[0].dtype in INTEGERS:
                return mask.inputs[0], low
    return None, 0.0


def _low(value: ir.Value | None) -> float:
    """Return the value if it is a constant that represents minus infinity (at most -1e4), else 0."""
    number = scalar(value)
    return number if number is not None and number <= -1e4 else 0.0


def padding_source(keep: ir.Value) -> ir.Value | None:
    """Return the `(batch, sequence)` padding mask from which a condition over (query, key) was computed, else `None`.

    Entry `[b, 0, q, k]` of the condition must be true exactly if entry `[b, k]` of the padding mask is non-zero.
    """
    conjunction = producer(keep, "And")
    if conjunction is not None:
        certain = [bounds(item) == (1.0, 1.0) for item in conjunction.inputs]
        if certain == [True, False]:
            return padding_source(conjunction.inputs[1]) if conjunction.inputs[1] is not None else None
        if certain == [False, True]:
            return padding_source(conjunction.inputs[0]) if conjunction.inputs[0] is not None else None
        return None
    for operator in ("Expand", "Unsqueeze"):
        node = producer(keep, operator)
        # `_key_shaped` checks that the result has the shape (batch, 1, 1, sequence), with the keys on the last axis.
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
    source_sizes, sizes = dims(source), dims(value)
    if source_sizes is None or sizes is None or len(sizes) != 4:
        return False
    if operator == "Expand":
        return (
            len(source_sizes) == 4
            and source_sizes[0] == sizes[0]
            and source_sizes[3] == sizes[3]
            and source_sizes[1] == source_sizes[2] == 1
        )
    return len(source_sizes) == 2 and sizes == [source_sizes[0], 1, 1, source_sizes[1]]


def _truth(value: ir.Value | None) -> ir.Value | None:
    """Return the mask from which a `(batch, sequence)` boolean was cast.

    Booleans that were not cast, and integer masks, are returned unchanged. For other values, return `None`.
    """
    sizes = dims(value)
    if value is None or sizes is None or len(sizes) != 2:
        return None
    cast = producer(value, "Cast")
    if cast is not None and value.dtype == ir.DataType.BOOL:
        return cast.inputs[0]
    return value if value.dtype == ir.DataType.BOOL or value.dtype in INTEGERS else None


def _addresses_keys(indices: ir.Value | None) -> bool:
    """Return whether indices of shape `(batch, 1, 1, sequence, 2)` contain exactly the pairs (row, key)."""
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
    """Return the condition in `empty = sum(cast(condition)) < 1`; `None` if `empty` is computed differently.

    `empty` is true for queries for which the condition has no true entry.
    """
    less = producer(empty, "Less")
    if less is None or scalar(less.inputs[1]) != 1.0:
        return None
    total = producer(less.inputs[0], "ReduceSum")
    axes = constant(total.inputs[1]) if total is not None and len(total.inputs) > 1 else None
    if total is None or axes is None or axes.reshape(-1).tolist() not in ([-1], [3]):
        return None
    cast = producer(total.inputs[0], "Cast")
    return cast.inputs[0] if cast is not None else None


# The following functions create masks that all attention nodes of a graph share.


def key_mask(source: ir.Value, graph: ir.Graph) -> ir.Value:
    """Return a mask `(batch, sequence) int32` that is 1 for visible keys, else 0; all calls for a graph return one value."""
    mask = made_by_name(graph, MASK_NAME)
    if mask is None:
        new = NewNodes(graph, MASK_NAME)
        is_visible = new.op("Cast", source, to=ir.DataType.BOOL, like=source, dtype=ir.DataType.BOOL)
        mask = new.op("Cast", is_visible, to=ir.DataType.INT32, like=source, dtype=ir.DataType.INT32)
        mask.name = MASK_NAME
        insert_after(source, graph, new.nodes)
    return mask


def rows_with_keys(source: ir.Value, graph: ir.Graph) -> ir.Value:
    """Return a value `(batch, 1, 1) bool`, true for rows with a visible key; all calls for a graph return one value."""
    rows = made_by_name(graph, ROWS_NAME)
    if rows is None:
        mask, new = key_mask(source, graph), NewNodes(graph, ROWS_NAME)
        assert mask.shape is not None
        sizes, truth = [mask.shape[0], 1], ir.DataType.BOOL
        total = new.op("ReduceMax", mask, new.constant([1]), keepdims=1, dtype=ir.DataType.INT32, shape=sizes)
        any_key = new.op("Cast", total, to=truth, dtype=truth, shape=sizes)
        rows = new.op("Unsqueeze", any_key, new.constant([2]), dtype=truth, shape=[*sizes, 1])
        rows.name = ROWS_NAME
        insert_after(mask, graph, new.nodes)
    return rows
