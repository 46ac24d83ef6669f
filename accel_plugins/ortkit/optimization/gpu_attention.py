"""Whole attention blocks as ONNX Runtime's `Attention` and `MultiHeadAttention`, whose CUDA kernels need the fused form.

`torch.export` writes attention as three products with biases, three head splits, a scaled product, an additive mask made of
a truth table over (query, key), `Softmax`, a product, a `Where` that zeroes fully masked rows, and a merge of heads. The
fused operators take the padding mask itself: `(batch, sequence)`, right for any mask. Operators:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..graph.analysis import Split, dims, only_user, producer, reshaped_heads, split_heads, unscaled
from ..graph.editing import MICROSOFT, add_initializer, constant, nodes, replace_value, root_graph, scalar
from ..graph.rewrites import graph_rewrite
from .padding import counted_condition, keep_condition, key_mask, padding_source, rows_with_keys

_SPLIT = (0, 2, 1, 3)


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight + bias`; `weight: (inner, outer)`, `bias: (outer,)` or `None`."""

    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    result: ir.Value


@dataclass(frozen=True, slots=True)
class Block:
    """One attention block.

    Attributes:
        query, key, value: Before the split into heads: `(batch, sequence, heads * depth)`.
        heads: Their number.
        depth: Size of one.
        scale: Of the scores.
        padding: The `(batch, sequence)` graph value that says which keys are kept, or `None`.
        biases: Further terms added to the scores, each `(batch or 1, heads or 1, sequence, sequence)`.
        empty: `(batch, 1, sequence, 1) bool`: rows whose result is zero. `None` when there are none, or when `padding`
            tells them.
        zero_empty: Whether rows without any key are zero.
        low: What is added to the scores of keys that `padding` leaves out.
        result: Of the whole block: `(batch, sequence, heads * depth)`.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    heads: int
    depth: int
    scale: float
    padding: ir.Value | None
    biases: tuple[ir.Value, ...]
    empty: ir.Value | None
    zero_empty: bool
    low: float
    result: ir.Value


@graph_rewrite
def fuse_attention(model: ir.Model) -> int:
    """Every attention block as `Attention` (query, key and value from one input) or `MultiHeadAttention`."""
    count = 0
    packed: dict[tuple[int | None, ...], ir.Value] = {}
    for softmax in nodes(model, "Softmax"):
        block = _match(softmax)
        if block is None:
            continue
        _replace(block, softmax, packed)
        count += 1
    return count


# Matching


def _match(softmax: ir.Node) -> Block | None:
    scores_term, other_terms = None, []
    rank = len(dims(softmax.outputs[0]) or ())
    if rank != 4 or softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    for term in _terms(softmax.inputs[0]):
        found = _scores(term)
        if found is not None and scores_term is None:
            scores_term = found
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
        keep, number = keep_condition(term)
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
        # Rows without a key: told by the padding alone, or by a condition of their own that is kept.
        if condition is not None and counted_condition(empty) is condition:
            zero_empty, empty = True, None
        elif (dims(empty) or [0, 0])[1] != 1 or len(dims(empty) or ()) != 4:
            return None
    merged = _merge(end, query[1] * query[2])
    if merged is None:
        return None
    return Block(
        query=query[0], key=key[0], value=value[0], heads=query[1], depth=query[2], scale=scale, padding=padding,
        biases=tuple(biases), empty=empty, zero_empty=zero_empty, low=low, result=merged,
    )  # fmt: skip


def _terms(value: ir.Value | None) -> list[ir.Value]:
    """What a value is the sum of."""
    add = producer(value, "Add")
    if add is None or value is None:
        return [value] if value is not None else []
    return [*_terms(add.inputs[0]), *_terms(add.inputs[1])]


def _scores(term: ir.Value) -> tuple[Split, Split, float] | None:
    """Query, key and scale when a term is `scale * query @ transpose(key)`."""
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
    """The product's result, behind the `Where` that zeroes rows if there is one, and that condition."""
    value = product.outputs[0]
    user = only_user(value)
    if user is not None and user.op_type == "Where" and user.inputs[2] is value and scalar(user.inputs[1]) == 0.0:
        return user.outputs[0], user.inputs[0]
    return value, None


def _merge(value: ir.Value, hidden: int) -> ir.Value | None:
    """The value with its heads side by side again."""
    transpose = only_user(value)
    if transpose is None or transpose.op_type != "Transpose":
        return None
    if tuple(transpose.attributes.get_ints("perm", ())) != _SPLIT:
        return None
    reshape = only_user(transpose.outputs[0])
    if reshape is None or reshape.op_type != "Reshape":
        return None
    before, after = dims(transpose.outputs[0]), dims(reshape.outputs[0])
    if before is None or after is None or len(after) != 3 or after[:2] != before[:2] or after[2] != hidden:
        return None
    return reshape.outputs[0]


def _is_bias(value: ir.Value, heads: int) -> bool:
    # The operators broadcast a bias over texts and heads, not over queries.
    sizes = dims(value)
    return sizes is not None and len(sizes) == 4 and sizes[1] in (1, heads) and sizes[2] != 1


# Replacing


def linear(value: ir.Value) -> Linear | None:
    """The product with constant weight, and the bias behind it, that make a value."""
    bias = None
    add = producer(value, "Add")
    inner: ir.Value | None = value
    if add is not None:
        for one, other in ((0, 1), (1, 0)):
            sizes = dims(add.inputs[other])
            if constant(add.inputs[other]) is not None and sizes is not None and len(sizes) == 1:
                inner, bias = add.inputs[one], add.inputs[other]
                break
    product = producer(inner, "MatMul")
    if product is None or product.inputs[0] is None or product.inputs[1] is None:
        return None
    weight = product.inputs[1]
    if constant(weight) is None or len(dims(weight) or ()) != 2:
        return None
    return Linear(product.inputs[0], weight, bias, value)


def _replace(block: Block, softmax: ir.Node, packed: dict[tuple[int | None, ...], ir.Value]) -> None:
    end = block.result.producer()
    assert end is not None
    graph = root_graph(softmax)
    made: list[ir.Node] = []
    attributes: dict[str, int | float] = {"num_heads": block.heads, "scale": block.scale}
    if block.padding is not None and not block.zero_empty:
        # A row without any key attends to all of them alike, if the number swallows the scores as the model's own does.
        attributes["mask_filter_value"] = max(block.low, float(np.finfo(np.float32).min))
    mask = key_mask(block.padding, graph) if block.padding is not None else None
    bias = _sum(block.biases, made)
    name = f"{softmax.name}.attention"
    parts = [linear(value) for value in (block.query, block.key, block.value)]
    first = parts[0]
    if first is not None and all(part is not None and part.x is first.x for part in parts):
        linears = [part for part in parts if part is not None]
        weight = _pack([part.weight for part in linears], f"{linears[0].weight.name}.qkv", graph, packed)
        biases = _pack_bias(linears, f"{linears[0].weight.name}.qkv_bias", graph, packed)
        fused = ir.node(
            "Attention", [first.x, weight, biases, mask, None, bias], attributes, domain=MICROSOFT, name=name
        )
    else:
        fused = ir.node(
            "MultiHeadAttention",
            [block.query, block.key, block.value, None, mask, bias],
            attributes,
            domain=MICROSOFT,
            name=name,
        )
    made.append(fused)
    result = fused.outputs[0]
    result.type, result.shape = block.result.type, block.result.shape
    zero = add_initializer(graph, "accel.zero", np.zeros((), _numpy(block.result)))
    if block.zero_empty and block.padding is not None:
        keep = rows_with_keys(block.padding, graph)
        made.append(ir.node("Where", [keep, result, zero], name=f"{name}.rows"))
    elif block.empty is not None:
        axis = add_initializer(graph, "accel.axis_1", np.array([1], np.int64))
        squeezed = ir.node("Squeeze", [block.empty, axis], name=f"{name}.empty")
        made += [squeezed, ir.node("Where", [squeezed.outputs[0], zero, result], name=f"{name}.rows")]
    last = made[-1].outputs[0]
    last.type, last.shape = block.result.type, block.result.shape
    graph.insert_before(end, made)
    replace_value(block.result, last)


def _numpy(value: ir.Value) -> np.dtype[Any]:
    dtype: np.dtype[Any] = (value.dtype or ir.DataType.FLOAT).numpy()
    return dtype


def _sum(values: Sequence[ir.Value], made: list[ir.Node]) -> ir.Value | None:
    total: ir.Value | None = None
    for value in values:
        if total is None:
            total = value
        else:
            node = ir.node("Add", [total, value])
            made.append(node)
            total = node.outputs[0]
    return total


def _pack(
    values: Sequence[ir.Value], name: str, graph: ir.Graph, packed: dict[tuple[int | None, ...], ir.Value]
) -> ir.Value:
    """Constants side by side along their last axis; the same ones (shared layers) once."""
    key = tuple(id(value) for value in values)
    if key not in packed:
        arrays = [constant(value) for value in values]
        packed[key] = add_initializer(graph, name, np.concatenate([a for a in arrays if a is not None], axis=-1))
    return packed[key]


def _pack_bias(
    linears: Sequence[Linear], name: str, graph: ir.Graph, packed: dict[tuple[int | None, ...], ir.Value]
) -> ir.Value:
    """Biases one behind another, zeros where there is none: ONNX Runtime's CPU kernel crashes without them (1.31)."""
    key = (None, *(id(part.bias if part.bias is not None else part.weight) for part in linears))
    if key not in packed:
        arrays = []
        for part in linears:
            weight = constant(part.weight)
            assert weight is not None
            array = constant(part.bias)
            arrays.append(array if array is not None else np.zeros(weight.shape[1], weight.dtype))
        packed[key] = add_initializer(graph, name, np.concatenate(arrays))
    return packed[key]
