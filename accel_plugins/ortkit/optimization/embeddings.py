"""Fusions of embedding layers: lookups, their sum and the normalization."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..graph.analysis import dims, producer
from ..graph.editing import MICROSOFT, NewNodes, constant, is_constant, nodes, replace_value, root_graph
from ..graph.rewrites import graph_rewrite

_INT32 = ir.DataType.INT32


@graph_rewrite
def fuse_embeddings(model: ir.Model) -> int:
    """Fuse two or three embedding lookups, their sum and its layer normalization into `EmbedLayerNormalization`."""
    count = 0
    casts: dict[int, ir.Value] = {}
    for norm in nodes(model, "LayerNormalization"):
        if len(norm.inputs) < 3 or norm.inputs[2] is None or norm.attributes.get_int("axis", -1) not in (-1, 2):
            continue
        if any(output.uses() for output in norm.outputs[1:]):
            continue
        gathers = [producer(term, "Gather") for term in _terms(norm.inputs[0])]
        if len(gathers) not in (2, 3) or any(g is None for g in gathers):
            continue
        lookups = [g for g in gathers if g is not None]
        if not all(_is_lookup(g, norm) for g in lookups):
            continue
        counted = [g for g in lookups if _counts_up(g.inputs[1])]
        # For position ids that are the same in all rows of the batch, the graph has a tensor with a single row.
        shared = [g for g in lookups if g not in counted and (dims(g.inputs[1]) or [0])[0] == 1]
        looked_up = [g for g in lookups if g not in counted and g not in shared]
        shapes = [dims(g.inputs[1]) for g in looked_up]
        if len(counted) + len(shared) > 1 or not shapes or len(shapes[0] or ()) != 2:
            continue
        if any(shape != shapes[0] for shape in shapes) or any(len(dims(g.inputs[1]) or ()) != 2 for g in shared):
            continue
        # The operator has inputs for word, position and segment embeddings. If no table has shared position ids, use
        # the position inputs for another embedding table.
        word, *others = looked_up
        position = (counted or shared or others[:1])[0]
        others = [g for g in others if g is not position]
        new = NewNodes(root_graph(norm), f"{norm.name}.embed")

        def narrow(value: ir.Value | None, new: NewNodes = new) -> ir.Value:
            assert value is not None
            if value.dtype == _INT32:
                return value
            if id(value) not in casts:
                casts[id(value)] = new.op("Cast", value, to=_INT32, like=value, dtype=_INT32)
            return casts[id(value)]

        segments = others[0] if others else None
        fused = ir.node(
            "EmbedLayerNormalization",
            [
                narrow(word.inputs[1]),
                narrow(segments.inputs[1]) if segments is not None else None,
                word.inputs[0],
                position.inputs[0],
                segments.inputs[0] if segments is not None else None,
                *norm.inputs[1:3],
                None,
                None if counted else narrow(position.inputs[1]),
            ],
            {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
            num_outputs=2,
            domain=MICROSOFT,
            name=f"{norm.name}.embed",
        )
        fused.outputs[1].type = ir.TensorType(_INT32)
        new.graph.insert_before(norm, [*new.nodes, fused])
        replace_value(norm.outputs[0], fused.outputs[0])
        count += 1
    return count


def _terms(value: ir.Value | None) -> list[ir.Value]:
    add = producer(value, "Add")
    if value is None:
        return []
    if add is None or (value.uses() and len(value.uses()) > 1):
        return [value]
    return [*_terms(add.inputs[0]), *_terms(add.inputs[1])]


def _is_lookup(gather: ir.Node, norm: ir.Node) -> bool:
    table, scale = gather.inputs[0], constant(norm.inputs[1])
    sizes = dims(table) or []
    return (
        is_constant(table)
        and scale is not None
        and len(sizes) == 2
        and sizes[1] == scale.size
        and gather.attributes.get_int("axis", 0) == 0
    )


def _counts_up(index: ir.Value | None) -> bool:
    """Return whether an index is 0, 1, 2, ... in every row: the first columns of a stored `arange`."""
    cut = producer(index, "Slice")
    if cut is None:
        return False
    stored = constant(cut.inputs[0])
    start, axes = constant(cut.inputs[1]), constant(cut.inputs[3]) if len(cut.inputs) > 3 else None
    if stored is None or stored.ndim != 2 or stored.shape[0] != 1 or start is None or axes is None:
        return False
    if start.reshape(-1).tolist() != [0] or axes.reshape(-1).tolist() not in ([1], [-1]):
        return False
    return bool((stored[0] == np.arange(stored.shape[1])).all())
