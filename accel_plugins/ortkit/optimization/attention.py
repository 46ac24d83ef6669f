"""Fusion of attention blocks into ONNX Runtime's `Attention` and `MultiHeadAttention`, which have fast CUDA kernels.

`torch.export` writes attention as many operators: three products with biases, three splits into heads, a scaled
product, an additive mask computed from a boolean tensor over (query, key), `Softmax`, a product, a `Where` that zeroes
fully masked rows, and a merge of heads. The fused operators read the `(batch, sequence)` padding mask directly. Their
result is correct for any mask.
Operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..graph.analysis import Linear, Split, dims, linear, only_user, producer, reshaped_heads, split_heads, unscaled
from ..graph.checkpoint_tensors import concatenated
from ..graph.editing import MICROSOFT, NewNodes, add_initializer, constant, nodes, replace_value, root_graph, scalar
from ..graph.rewrites import graph_rewrite
from .padding_masks import counted_condition, keep_condition, key_mask, padding_source, rows_with_keys

_SPLIT = (0, 2, 1, 3)


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """One attention block in a graph.

    Attributes:
        query, key, value: The values before the split into heads, `(batch, sequence, heads * depth)`.
        heads: The number of heads.
        scale: The factor of the scores.
        padding: The `(batch, sequence)` graph value that is non-zero for the keys to attend to, or `None`.
        biases: Further terms added to the scores, each `(batch or 1, heads or 1, sequence, sequence)`.
        empty: `(batch, 1, sequence, 1) bool`, true for queries whose result is set to zero. `None` if no result is
            set to zero, or if `padding` alone decides which results are zero.
        zero_empty: Whether the result is zero in batch rows where `padding` masks every key.
        low: The number that the graph adds to the scores of masked keys.
        result: The output of the whole block, `(batch, sequence, heads * depth)`.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    heads: int
    scale: float
    padding: ir.Value | None
    biases: tuple[ir.Value, ...]
    empty: ir.Value | None
    zero_empty: bool
    low: float
    result: ir.Value


Packed = dict[tuple[int | None, ...], ir.Value]
"""Packed weights and biases, keyed by the ids of the constants that they contain."""


@graph_rewrite
def fuse_attention(model: ir.Model) -> int:
    """Fuse every attention block into `Attention` or `MultiHeadAttention`, with the padding mask as input.

    `Attention` is used if query, key and value are computed from the same input.
    """
    count = 0
    packed: Packed = {}
    for softmax in nodes(model, "Softmax"):
        block = _match(softmax)
        if block is not None:
            _replace(block, softmax, packed)
            count += 1
    return count


@graph_rewrite
def fuse_cpu_attention(model: ir.Model) -> int:
    """Fuse every attention block into `MultiHeadAttention`, with the mask as an additive bias: one operator replaces ten.

    Grouped-query attention, where several query heads share a key head, is not changed.
    """
    count = 0
    for softmax in nodes(model, "Softmax"):
        block = _match(softmax, reads_padding=False)
        if block is not None and len(block.biases) <= 1 and all(_is_whole(bias, block) for bias in block.biases):
            _replace(block, softmax, None)
            count += 1
    return count


def _is_whole(bias: ir.Value, block: AttentionBlock) -> bool:
    """Return whether a bias has an entry for each pair of query and key."""
    sizes, query, key = dims(bias), dims(block.query), dims(block.key)
    assert sizes is not None
    assert query is not None
    assert key is not None
    return sizes[0] in (1, query[0]) and sizes[2:] == [query[1], key[1]]


# The following functions find attention blocks in a graph.


def _match(softmax: ir.Node, *, reads_padding: bool = True) -> AttentionBlock | None:
    scores_term, other_terms = None, []
    rank = len(dims(softmax.outputs[0]) or ())
    if rank != 4 or softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    for term in _terms(softmax.inputs[0]):
        scores = _scores(term)
        if scores is not None and scores_term is None:
            scores_term = scores
        else:
            other_terms.append(term)
    if scores_term is None:
        return None
    query, key, scale = scores_term
    product = only_user(softmax.outputs[0])
    if product is None or product.op_type != "MatMul" or product.inputs[0] is not softmax.outputs[0]:
        return None
    value = split_heads(product.inputs[1])
    if value is None or value[1:] != query[1:] or key[1:] != query[1:]:
        return None
    padding, biases, condition, low = None, [], None, 0.0
    for term in other_terms:
        keep, number = keep_condition(term) if reads_padding else (None, 0.0)
        source = padding_source(keep) if keep is not None else None
        if source is not None and padding is None:
            padding, condition, low = source, keep, number
        elif _is_bias(term, query[1]):
            biases.append(term)
        else:
            return None
    end, empty = _after(product)
    zero_empty = False
    if empty is not None:
        # `empty` marks queries without a visible key. If the graph computes `empty` from the padding, the block needs
        # only the padding. If not, the block keeps `empty` as a separate condition.
        if condition is not None and counted_condition(empty) is condition:
            zero_empty, empty = True, None
        elif len(dims(empty) or ()) != 4 or (dims(empty) or [])[1::2] != [1, 1]:
            return None
    merged = _merge(end, query[1] * query[2])
    if merged is None:
        return None
    return AttentionBlock(
        query=query[0], key=key[0], value=value[0], heads=query[1], scale=scale, padding=padding,
        biases=tuple(biases), empty=empty, zero_empty=zero_empty, low=low, result=merged,
    )  # fmt: skip


def _terms(value: ir.Value | None) -> list[ir.Value]:
    """Return the terms of a sum; nested sums are flattened."""
    add = producer(value, "Add")
    if add is None or value is None:
        return [value] if value is not None else []
    return [*_terms(add.inputs[0]), *_terms(add.inputs[1])]


def _scores(term: ir.Value) -> tuple[Split, Split, float] | None:
    """Return (query, key, scale) if a term is `scale * query @ transpose(key)`, else `None`."""
    inner, outer_scale = unscaled(term)
    product = producer(inner, "MatMul")
    if product is None:
        return None
    left, query_scale = unscaled(product.inputs[0])
    right, key_scale = unscaled(product.inputs[1])
    query = split_heads(left)
    transpose = producer(right, "Transpose")
    if query is None or transpose is None:
        return None
    perm = tuple(transpose.attributes.get_ints("perm", ()))
    if perm == (0, 1, 3, 2):
        middle, inner_scale = unscaled(transpose.inputs[0])
        key, key_scale = split_heads(middle), key_scale * inner_scale
    elif perm == (0, 2, 3, 1):
        key = reshaped_heads(transpose.inputs[0])
    else:
        key = None
    return (query, key, outer_scale * query_scale * key_scale) if key is not None else None


def _after(product: ir.Node) -> tuple[ir.Value, ir.Value | None]:
    """Return the result of the product of weights and values, and the condition that sets masked rows of it to zero.

    The condition is the first input of a `Where` after the product; `None` if there is no `Where`.
    """
    value = product.outputs[0]
    user = only_user(value)
    if user is not None and user.op_type == "Where" and user.inputs[2] is value and scalar(user.inputs[1]) == 0.0:
        return user.outputs[0], user.inputs[0]
    return value, None


def _merge(value: ir.Value, hidden: int) -> ir.Value | None:
    """Return the value after the merge of heads (`Transpose` and `Reshape`) that follows a value; `None` without a merge."""
    transpose = only_user(value)
    if transpose is None or transpose.op_type != "Transpose":
        return None
    if tuple(transpose.attributes.get_ints("perm", ())) != _SPLIT:
        return None
    reshape = only_user(transpose.outputs[0])
    if reshape is None or reshape.op_type != "Reshape":
        return None
    split_sizes, merged_sizes = dims(transpose.outputs[0]), dims(reshape.outputs[0])
    if (
        split_sizes is None
        or merged_sizes is None
        or len(merged_sizes) != 3
        or merged_sizes[:2] != split_sizes[:2]
        or merged_sizes[2] != hidden
    ):
        return None
    return reshape.outputs[0]


def _is_bias(value: ir.Value, heads: int) -> bool:
    # The fused operators broadcast a bias over the batch and over heads, but not over queries.
    sizes = dims(value)
    return sizes is not None and len(sizes) == 4 and sizes[1] in (1, heads) and sizes[2] != 1


# The following functions replace attention blocks.


def _replace(block: AttentionBlock, softmax: ir.Node, packed: Packed | None) -> None:
    """Replace an attention block by a fused operator.

    Args:
        block: The attention block.
        softmax: The `Softmax` node of the block.
        packed: The concatenated weights that earlier calls added, reused for equal weights. If this is `None`, the
            separate products for query, key and value are kept.
    """
    end = block.result.producer()
    assert end is not None
    new = NewNodes(root_graph(softmax), f"{softmax.name}.attention")
    attributes: dict[str, Any] = {"num_heads": block.heads, "scale": block.scale}
    if block.padding is not None and not block.zero_empty:
        # A row whose keys are all masked must give all keys the same weight, as in the original graph. The addition of
        # a very low number has this effect, because rounding removes the scores.
        attributes["mask_filter_value"] = max(block.low, float(np.finfo(np.float32).min))
    mask = key_mask(block.padding, new.graph) if block.padding is not None else None
    bias = None
    for term in block.biases:
        bias = term if bias is None else new.op("Add", bias, term)
    parts = [linear(value) for value in (block.query, block.key, block.value)] if packed is not None else []
    linears = [part for part in parts if part is not None]
    if packed is not None and len(linears) == 3 and len({id(part.x) for part in linears}) == 1:
        inputs = [linears[0].x, *_pack(linears, new.graph, packed), mask, None, bias]
        result = new.op("Attention", *inputs, domain=MICROSOFT, like=block.result, **attributes)
    else:
        inputs = [block.query, block.key, block.value, None, mask, bias]
        result = new.op("MultiHeadAttention", *inputs, domain=MICROSOFT, like=block.result, **attributes)
    if block.empty is not None or (block.zero_empty and block.padding is not None):
        dtype = block.result.dtype or ir.DataType.FLOAT
        zero = add_initializer(new.graph, "accel.zero", np.zeros((), dtype.numpy()))
        if block.empty is None:
            assert block.padding is not None
            keep = rows_with_keys(block.padding, new.graph)
            result = new.op("Where", keep, result, zero, like=block.result)
        else:
            empty = new.op("Squeeze", block.empty, new.constant([1]))
            if packed is None:
                # ONNX Runtime's CPU kernel of `Where` passes over memory three times; `Mul` passes over memory once.
                keep = new.op("Cast", new.op("Not", empty), to=dtype, dtype=dtype)
                result = new.op("Mul", result, keep, like=block.result)
            else:
                result = new.op("Where", empty, zero, result, like=block.result)
    new.graph.insert_before(end, new.nodes)
    replace_value(block.result, result)


def _pack(linears: Sequence[Linear], graph: ir.Graph, packed: Packed) -> list[ir.Value]:
    """Concatenate the layers' weights and biases along the last axis; add each combination to the graph only once.

    Missing biases become zeros, because ONNX Runtime's CPU kernel crashes without a bias (1.31).
    """
    weights = [tensor for part in linears if (tensor := ir.convenience.get_const_tensor(part.weight)) is not None]
    biases = [
        array if (array := constant(part.bias)) is not None else np.zeros(int(weight.shape[1]), weight.dtype.numpy())
        for part, weight in zip(linears, weights, strict=True)
    ]
    keys: list[tuple[int | None, ...]] = [
        tuple(id(part.weight) for part in linears),
        (None, *(id(part.bias if part.bias is not None else part.weight) for part in linears)),
    ]
    for key, arrays, name in zip(keys, (weights, biases), ("qkv", "qkv_bias"), strict=True):
        if key not in packed:
            packed[key] = add_initializer(graph, f"{linears[0].weight.name}.{name}", concatenated(arrays))
    return [packed[key] for key in keys]
