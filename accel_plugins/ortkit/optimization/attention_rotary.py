"""Fusion of rotary position embeddings, and of the split of a packed projection, into `GroupQueryAttention`.

Use this only for ONNX Runtime's CUDA kernels, and only if flash attention does not run. Flash attention, like the CPU
kernel for prompts, ignores the position ids of the graph and computes its own position ids (ONNX Runtime 1.31).
"""

from __future__ import annotations

import onnx_ir as ir

from ..graph.analysis import dims, only_user, producer
from ..graph.editing import MICROSOFT, NewNodes, nodes, replace_value, root_graph
from ..graph.rewrites import graph_rewrite

_OPERATOR = "GroupQueryAttention"
_PAST_KEY, _COS, _BIAS, _SINKS = 3, 7, 10, 11
# For rotary embeddings, the operator requires a head size that is a multiple of this number.
_HEAD_SIZE_MULTIPLE = 16


@graph_rewrite
def fuse_inner_rotary(model: ir.Model) -> int:
    """Fuse `Split` and both `RotaryEmbedding` nodes into `GroupQueryAttention`: one kernel launch replaces four.

    `GroupQueryAttention` reads the cosine and sine of each token from a table, by the token's position id. The table
    contains the values that the graph computed for the tokens of this call (see `fuse_rotary`), so the result is
    correct for any scaling of positions. The operator requires one table row for each token of the KV cache, so rows
    that are never read are appended. Graphs with attention windows, soft caps or sinks are not changed, because ONNX
    Runtime computes their attention with flash attention.
    """
    count = 0
    if not all(map(_is_plain, nodes(model, _OPERATOR, domain=MICROSOFT))):
        return 0
    tables: dict[int, ir.Value] = {}
    for node in nodes(model, _OPERATOR, domain=MICROSOFT):
        rotations = [producer(value, "RotaryEmbedding", MICROSOFT) for value in node.inputs[:2]]
        if any(
            rotation is None or rotation.attributes or only_user(rotation.outputs[0]) is None for rotation in rotations
        ):
            continue
        query, key = (rotation for rotation in rotations if rotation is not None)
        same_tables = all(rotation is other for rotation, other in zip(query.inputs[1:], key.inputs[1:], strict=True))
        if not same_tables or not _fits(node, query):
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
    """Return whether a `GroupQueryAttention` node has no window, no soft cap and no sinks."""
    window, cap = node.attributes.get_int("local_window_size", -1), node.attributes.get_float("softcap", 0.0)
    return window <= 0 and cap == 0 and all(value is None for value in node.inputs[_SINKS:])


def _fits(node: ir.Node, query: ir.Node) -> bool:
    """Return whether rotary inputs can be added to an attention node.

    The node must have no rotary inputs yet, a supported head size, and a position id for each token.
    """
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
    """Return the packed value that a `Split` divides into query, key and value; else `None`.

    Also return `None` if a node other than the matching node of `users` reads a part.
    """
    split = producer(inputs[0], "Split")
    if split is None or len(split.outputs) != len(users) or split.attributes.get_int("axis", 0) not in (-1, 2):
        return None
    parts = zip(inputs, split.outputs, users, strict=False)
    is_private = all(part is output and only_user(output) is user for part, output, user in parts)
    return split.inputs[0] if is_private else None


def _longer(wave: ir.Value | None, node: ir.Node, tables: dict[int, ir.Value]) -> ir.Value:
    """Return a table `(tokens, depth / 2)` with more rows; the number of added rows is the token capacity of the KV cache."""
    assert wave is not None
    if id(wave) in tables:
        return tables[id(wave)]
    new, integer = NewNodes(root_graph(node), f"{wave.name}.longer"), ir.DataType.INT64
    room = new.op("Shape", node.inputs[_PAST_KEY], start=2, end=3, dtype=integer)
    sizes = new.op("Concat", new.constant([0, 0]), room, new.constant([0]), axis=0, dtype=integer)
    # ONNX Runtime's CUDA provider (1.31) has no `Pad` kernel for bfloat16.
    kind = ir.DataType.FLOAT if wave.dtype == ir.DataType.BFLOAT16 else wave.dtype
    table = wave if kind == wave.dtype else new.op("Cast", wave, to=kind, dtype=kind)
    table = new.op("Pad", table, sizes, dtype=kind)
    tables[id(wave)] = table if kind == wave.dtype else new.op("Cast", table, to=wave.dtype, dtype=wave.dtype)
    new.graph.insert_before(node, new.nodes)
    return tables[id(wave)]


def _replace(node: ir.Node, inputs: list[ir.Value | None]) -> None:
    """Replace a `GroupQueryAttention` node by a node that reads `inputs`, including the rotary tables."""
    attributes = [*node.attributes.values(), ir.AttrInt64("do_rotary", 1)]
    attention = ir.Node(MICROSOFT, _OPERATOR, inputs, attributes, num_outputs=len(node.outputs), name=node.name)
    root_graph(node).insert_before(node, attention)
    for old, new in zip(node.outputs, attention.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
        replace_value(old, new)
    root_graph(node).remove(node, safe=True)
