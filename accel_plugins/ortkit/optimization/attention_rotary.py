"""Rotary positions, and the split of one projection into query, key and value, inside `GroupQueryAttention`.

For ONNX Runtime's CUDA kernels only, and of those not for flash attention: that, like the CPU's kernel for a prompt, counts
positions by itself and does not look at those that it is given (1.31).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..graph.analysis import dims, only_user, producer
from ..graph.editing import MICROSOFT, add_initializer, nodes, replace_value, root_graph
from ..graph.rewrites import graph_rewrite

_OPERATOR = "GroupQueryAttention"
_PAST_KEY, _COS, _BIAS, _SINKS = 3, 7, 10, 11
# The operator takes the heads of rotated values in such steps only.
_HEAD_SIZE_MULTIPLE = 16


@graph_rewrite
def fuse_inner_rotary(model: ir.Model) -> int:
    """`Split` and `RotaryEmbedding` in front of an attention with a cache, as its own inputs: a GPU launches one kernel where
    it launched four.

    The operator looks angles up by the position that it is given for each token, and wants a table with as many rows as the
    cache has tokens. The table stays the one that the graph computed for the tokens of this call (see `fuse_rotary`), which
    holds for any scaling of positions, with unread rows behind it. Graphs with windows, caps or sinks are left alone: they are
    computed by flash attention.
    """
    count = 0
    if not all(map(_is_plain, nodes(model, _OPERATOR, domain=MICROSOFT))):
        return 0
    tables: dict[int, ir.Value] = {}
    for node in nodes(model, _OPERATOR, domain=MICROSOFT):
        turned = [producer(value, "RotaryEmbedding", MICROSOFT) for value in node.inputs[:2]]
        if any(one is None or one.attributes or only_user(one.outputs[0]) is None for one in turned):
            continue
        query, key = (one for one in turned if one is not None)
        alike = all(one is other for one, other in zip(query.inputs[1:], key.inputs[1:], strict=True))
        if not alike or not _fits(node, query):
            continue
        positions, *waves = query.inputs[1:]
        inputs = [query.inputs[0], key.inputs[0], *node.inputs[2:]]
        packed = _packed(inputs, [query, key, node])
        if packed is not None:
            inputs[:3] = [packed, None, None]
        inputs += [None] * (_BIAS - len(inputs))
        inputs[_COS:_BIAS] = [*(_longer(wave, node, tables) for wave in waves), positions]
        _replace(node, inputs)
        count += 1
    return count


def _is_plain(node: ir.Node) -> bool:
    """Whether an attention sees all tokens up to one's own, by their scores as they are."""
    window, cap = node.attributes.get_int("local_window_size", -1), node.attributes.get_float("softcap", 0.0)
    return window <= 0 and cap == 0 and all(value is None for value in node.inputs[_SINKS:])


def _fits(node: ir.Node, query: ir.Node) -> bool:
    """Whether an attention has no such inputs yet, its heads have a size for them, and each token has a position."""
    past = dims(node.inputs[_PAST_KEY])
    sizes = dims(query.inputs[0])
    free = len(node.inputs) <= _COS or all(value is None for value in node.inputs[_COS:_BIAS])
    return (
        free
        and past is not None
        and isinstance(past[3], int)
        and past[3] % _HEAD_SIZE_MULTIPLE == 0
        and sizes is not None
        and len(sizes) == 3
        and dims(query.inputs[1]) == sizes[:2]
    )


def _packed(inputs: list[ir.Value | None], users: list[ir.Node]) -> ir.Value | None:
    """What query, key and value are the three parts of, each read by one of `users` alone."""
    split = producer(inputs[0], "Split")
    if split is None or len(split.outputs) != len(users) or split.attributes.get_int("axis", 0) not in (-1, 2):
        return None
    parts = zip(inputs, split.outputs, users, strict=False)
    own = all(part is output and only_user(output) is user for part, output, user in parts)
    return split.inputs[0] if own else None


def _longer(wave: ir.Value | None, node: ir.Node, tables: dict[int, ir.Value]) -> ir.Value:
    """A table `(tokens, depth / 2)` with as many rows more as the cache has room for."""
    assert wave is not None
    if id(wave) in tables:
        return tables[id(wave)]
    graph, name = root_graph(node), str(wave.name)
    room = ir.node("Shape", [node.inputs[_PAST_KEY]], {"start": 2, "end": 3}, name=f"{name}.room")
    before = add_initializer(graph, f"{name}.before", np.zeros(2, np.int64))
    after = add_initializer(graph, f"{name}.after", np.zeros(1, np.int64))
    sizes = ir.node("Concat", [before, room.outputs[0], after], {"axis": 0}, name=f"{name}.sizes")
    for one in (room, sizes):
        one.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    halves = wave.dtype == ir.DataType.BFLOAT16
    # ONNX Runtime's GPU provider (1.31) has no `Pad` for bfloat16.
    wide = ir.node("Cast", [wave], {"to": ir.DataType.FLOAT}, name=f"{name}.wide") if halves else None
    padded = ir.node("Pad", [wide.outputs[0] if wide else wave, sizes.outputs[0]], name=f"{name}.longer")
    back = ir.node("Cast", [padded.outputs[0]], {"to": wave.dtype}, name=f"{name}.back") if halves else None
    for one in (wide, padded):
        if one is not None:
            one.outputs[0].type = ir.TensorType(ir.DataType.FLOAT) if halves else wave.type
    last = back or padded
    last.outputs[0].type = wave.type
    graph.insert_before(node, [one for one in (room, sizes, wide, padded, back) if one is not None])
    tables[id(wave)] = last.outputs[0]
    return last.outputs[0]


def _replace(node: ir.Node, inputs: list[ir.Value | None]) -> None:
    """The same attention with other inputs, among them tables."""
    attributes = [*node.attributes.values(), ir.AttrInt64("do_rotary", 1)]
    made = ir.Node(MICROSOFT, _OPERATOR, inputs, attributes, num_outputs=len(node.outputs), name=node.name)
    root_graph(node).insert_before(node, made)
    for old, new in zip(node.outputs, made.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
        replace_value(old, new)
    root_graph(node).remove(node, safe=True)
