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
from onnx_ir.passes import common as passes

from ..graph.analysis import bounds, dims
from ..graph.editing import INTEGERS, MICROSOFT, add_initializer, constant, nodes, replace_value, root_graph, scalar
from .attention import only_user, producer

MASK_NAME = "accel.key_mask"
"""Name of the `(batch, sequence) int32` value that fused attention takes its mask from; `masks` finds it by this."""
ROWS_NAME = "accel.rows_with_keys"
"""Name of the `(batch, 1, 1) bool` value that is false for rows without any key."""
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
    passes.RemoveUnusedNodesPass()(model)
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
    value = _unsplit(product.inputs[1])
    if value is None or value[1:] != query[1:] or key[1:] != query[1:]:
        return None
    padding, biases, condition, low = None, [], None, 0.0
    for term in other_terms:
        keep, number = _keep_condition(term)
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
        if condition is not None and _counts(empty) is condition:
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


def _unscaled(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """What a value is a constant multiple of."""
    factor = 1.0
    while value is not None:
        node = producer(value, "Mul") or producer(value, "Div")
        if node is None:
            break
        right, left = scalar(node.inputs[1]), scalar(node.inputs[0]) if node.op_type == "Mul" else None
        if right is not None:
            factor, value = (factor * right if node.op_type == "Mul" else factor / right), node.inputs[0]
        elif left is not None:
            factor, value = factor * left, node.inputs[1]
        else:
            break
    return value, factor


Split = tuple[ir.Value, int, int]
"""A value before the split into heads, their number and the size of one."""


def _scores(term: ir.Value) -> tuple[Split, Split, float] | None:
    """Query, key and scale when a term is `scale * query @ transpose(key)`."""
    inner, outer_scale = _unscaled(term)
    product = producer(inner, "MatMul")
    if product is None:
        return None
    left, query_scale = _unscaled(product.inputs[0])
    right, key_scale = _unscaled(product.inputs[1])
    query = _unsplit(left)
    transpose = producer(right, "Transpose")
    if query is None or transpose is None:
        return None
    perm = tuple(transpose.attributes.get_ints("perm", ()))
    if perm == (0, 1, 3, 2):
        middle, inner_scale = _unscaled(transpose.inputs[0])
        key, key_scale = _unsplit(middle), key_scale * inner_scale
    elif perm == (0, 2, 3, 1):
        key = _heads(transpose.inputs[0])
    else:
        key = None
    return (query, key, outer_scale * query_scale * key_scale) if key is not None else None


def _unsplit(value: ir.Value | None) -> Split | None:
    """What `(batch, heads, sequence, depth)` was split from."""
    transpose = producer(value, "Transpose")
    if transpose is None or tuple(transpose.attributes.get_ints("perm", ())) != _SPLIT:
        return None
    return _heads(transpose.inputs[0])


def _heads(value: ir.Value | None) -> Split | None:
    """What `(batch, sequence, heads, depth)` was reshaped from."""
    reshape = producer(value, "Reshape")
    if reshape is None or reshape.inputs[0] is None:
        return None
    before, after = dims(reshape.inputs[0]), dims(value)
    if before is None or after is None or len(before) != 3 or len(after) != 4 or before[:2] != after[:2]:
        return None
    heads, depth = after[2:]
    if not isinstance(heads, int) or not isinstance(depth, int) or before[2] != heads * depth:
        return None
    return reshape.inputs[0], heads, depth


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


def _keep_condition(term: ir.Value) -> tuple[ir.Value | None, float]:
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


def _counts(empty: ir.Value) -> ir.Value | None:
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
    mask = _mask(block.padding, graph) if block.padding is not None else None
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
        keep = _rows(block.padding, graph)
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


def _made(graph: ir.Graph, name: str) -> ir.Value | None:
    return next((output for node in graph for output in node.outputs if output.name == name), None)


def _insert_after(source: ir.Value, graph: ir.Graph, made: Sequence[ir.Node]) -> None:
    maker = source.producer()
    if maker is None:
        graph.insert_before(graph[0], made)
    else:
        graph.insert_after(maker, made)


def _mask(source: ir.Value, graph: ir.Graph) -> ir.Value:
    """1 for the keys kept and 0 for the others, once for the whole graph: `(batch, sequence) int32`."""
    found = _made(graph, MASK_NAME)
    if found is not None:
        return found
    kept = ir.node("Cast", [source], {"to": ir.DataType.BOOL}, name=f"{MASK_NAME}.kept")
    mask = ir.node("Cast", [kept.outputs[0]], {"to": ir.DataType.INT32}, name=MASK_NAME)
    kept.outputs[0].type, kept.outputs[0].shape = ir.TensorType(ir.DataType.BOOL), source.shape
    mask.outputs[0].name = MASK_NAME
    mask.outputs[0].type, mask.outputs[0].shape = ir.TensorType(ir.DataType.INT32), source.shape
    _insert_after(source, graph, [kept, mask])
    return mask.outputs[0]


def _rows(source: ir.Value, graph: ir.Graph) -> ir.Value:
    """Whether a row keeps any key, once for the whole graph: `(batch, 1, 1) bool`."""
    found = _made(graph, ROWS_NAME)
    if found is not None:
        return found
    mask = _mask(source, graph)
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
    _insert_after(mask, graph, [total, truth, rows])
    return rows.outputs[0]
