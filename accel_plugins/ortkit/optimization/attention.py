"""Attention as `torch.export` writes it, and forms of it that ONNX Runtime's CPU kernels compute faster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graph.analysis import dims, only_user, producer, split_heads, unscaled
from ..graph.editing import MICROSOFT, add_initializer, constant, nodes, replace_node, replace_value, root_graph, scalar
from ..graph.rewrites import graph_rewrite, node_rewrite


@dataclass(frozen=True, slots=True)
class Scores:
    """`(query * a) @ transpose(key * b)`.

    Attributes:
        node: The product.
        query: `(batch, heads, length, depth)`.
        key: `(batch, heads, total, depth)`.
        scale: `a * b`.
    """

    node: ir.Node
    query: ir.Value
    key: ir.Value
    scale: float


def _match_scores(node: ir.Node) -> Scores | None:
    query, query_scale = unscaled(node.inputs[0])
    transposed, key_scale = unscaled(node.inputs[1])
    transpose = producer(transposed, "Transpose")
    if query is None or transpose is None:
        return None
    perm = list(transpose.attributes.get_ints("perm", []))
    rank = len(perm)
    if rank < 3 or perm != [*range(rank - 2), rank - 1, rank - 2]:
        return None
    key = transpose.inputs[0]
    if key is None:
        return None
    key, inner_scale = unscaled(key)
    if key is None or constant(key) is not None or constant(query) is not None:
        return None
    return Scores(node, query, key, query_scale * key_scale * inner_scale)


@node_rewrite("MatMul")
def fuse_scores(node: ir.Node) -> bool:
    """Scale and transpose inside the product of query and key (`FusedMatMul`)."""
    found = _match_scores(node)
    if found is None:
        return False
    fused = ir.node(
        "FusedMatMul",
        [found.query, found.key],
        {"alpha": found.scale, "transA": 0, "transB": 1},
        domain=MICROSOFT,
        name=f"{node.name}.scores",
    )
    replace_node(node, fused)
    return True


@graph_rewrite
def multiply_masked_rows(model: ir.Model) -> int:
    """`Where(masked, 0, attention)` as a product with 0 or 1: one pass over memory instead of three.

    Equal for finite values, which a product of `Softmax` with finite values is.
    """
    count = 0
    keeps: dict[int, ir.Value] = {}
    for node in nodes(model, "Where"):
        condition, zero, kept = node.inputs
        product = producer(kept, "MatMul")
        if product is None or producer(product.inputs[0], "Softmax") is None or scalar(zero) != 0.0:
            continue
        assert condition is not None
        assert kept is not None
        graph = root_graph(node)
        if id(condition) not in keeps:
            keeps[id(condition)] = _kept_rows(graph, condition, node, dtype=kept.dtype)
        replace_node(node, ir.node("Mul", [kept, keeps[id(condition)]], name=f"{node.name}.keep"))
        count += 1
    return count


def _kept_rows(
    graph: ir.Graph, masked: ir.Value, before: ir.Node, *, dtype: ir.DataType | None, squeeze: bool = False
) -> ir.Value:
    """1 where `masked` is false, 0 where it is true, in the type of what is kept (float32 where that is unknown), computed as
    early as it can be; `squeeze` drops the heads' axis.
    """
    dtype = dtype or ir.DataType.FLOAT
    negated = ir.node("Not", [masked], name=f"{masked.name}.not")
    cast = ir.node("Cast", [negated.outputs[0]], {"to": dtype}, name=f"{masked.name}.keep")
    made = [negated, cast]
    negated.outputs[0].shape = cast.outputs[0].shape = masked.shape
    negated.outputs[0].type = masked.type
    cast.outputs[0].type = ir.TensorType(dtype)
    if squeeze:
        axis = add_initializer(graph, f"{masked.name}.heads_axis", np.array([1], np.int64))
        made.append(ir.node("Squeeze", [cast.outputs[0], axis], name=f"{masked.name}.rows"))
        made[-1].outputs[0].type = cast.outputs[0].type
    maker = masked.producer()
    if maker is not None and maker.graph is graph:
        graph.insert_after(maker, made)
    else:
        graph.insert_before(before, made)
    return made[-1].outputs[0]


@graph_rewrite
def fuse_attention(model: ir.Model) -> int:
    """Whole attentions as `MultiHeadAttention`: one operator instead of ten, and each head stays in the cache.

    Fully masked rows are zeroed behind it, as before. Attentions with several queries for a key (grouped) keep their form.
    """
    count = 0
    keeps: dict[int, ir.Value] = {}
    for product in nodes(model, "MatMul"):
        softmax = producer(product.inputs[0], "Softmax")
        if softmax is None or softmax.attributes.get_int("axis", -1) not in (-1, 3):
            continue
        added = producer(softmax.inputs[0], "Add")
        multiplied = producer(added.inputs[0] if added is not None else softmax.inputs[0], "MatMul")
        scores = _match_scores(multiplied) if multiplied is not None else None
        if scores is None:
            continue
        parts = [split_heads(value) for value in (scores.query, scores.key, product.inputs[1])]
        end = _merged(product)
        if end is None or any(part is None for part in parts):
            continue
        (query, heads, _), (key, key_heads, _), (value, value_heads, _) = (part for part in parts if part is not None)
        mask = added.inputs[1] if added is not None else None
        if not heads == key_heads == value_heads or not _mask_fits(mask, query, key, heads):
            continue
        merge, masked = end
        if masked is not None and (dims(masked) or [0] * 4)[1::2] != [1, 1]:
            continue
        graph = root_graph(product)
        fused = ir.node(
            "MultiHeadAttention",
            [query, key, value, None, None, mask] if mask is not None else [query, key, value],
            {"num_heads": heads, "scale": scores.scale},
            domain=MICROSOFT,
            name=f"{product.name}.attention",
        )
        result = fused.outputs[0]
        graph.insert_before(merge, fused)
        result.type, result.shape = merge.outputs[0].type, merge.outputs[0].shape
        if masked is not None:
            if id(masked) not in keeps:
                keeps[id(masked)] = _kept_rows(graph, masked, product, dtype=result.dtype, squeeze=True)
            zeroed = ir.node("Mul", [result, keeps[id(masked)]], name=f"{product.name}.keep")
            graph.insert_before(merge, zeroed)
            result = zeroed.outputs[0]
        replace_value(merge.outputs[0], result)
        count += 1
    return count


def _merged(product: ir.Node) -> tuple[ir.Node, ir.Value | None] | None:
    """The `Reshape` that joins an attention's heads again, and the condition under which rows are zeroed before it."""
    reader = only_user(product.outputs[0])
    masked = None
    if reader is not None and reader.op_type == "Where" and scalar(reader.inputs[1]) == 0.0:
        if reader.inputs[2] is not product.outputs[0]:
            return None
        masked, reader = reader.inputs[0], only_user(reader.outputs[0])
    if reader is None or reader.op_type != "Transpose":
        return None
    merge = only_user(reader.outputs[0])
    sizes = dims(merge.outputs[0]) if merge is not None and merge.op_type == "Reshape" else None
    if (
        merge is None
        or sizes is None
        or len(sizes) != 3
        or list(reader.attributes.get_ints("perm", [])) != [0, 2, 1, 3]
    ):
        return None
    return merge, masked


def _mask_fits(mask: ir.Value | None, query: ir.Value, key: ir.Value, heads: int) -> bool:
    """Whether an added mask is `(batch or 1, heads or 1, length, total)`, as `MultiHeadAttention` takes it."""
    if mask is None:
        return True
    sizes, query_sizes, key_sizes = dims(mask), dims(query), dims(key)
    if sizes is None or query_sizes is None or key_sizes is None or len(sizes) != 4:
        return False
    return (
        sizes[0] in (1, query_sizes[0])
        and sizes[1] in (1, heads)
        and sizes[2] == query_sizes[1]
        and sizes[3] == key_sizes[1]
    )
