"""Layers of decoders as few operators: for a single token a GPU waits for launches, and a CPU for its threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from ..graph.analysis import dims, only_user, producer
from ..graph.editing import MICROSOFT, add_initializer, constant, nodes, replace_value, root_graph
from ..graph.rewrites import graph_rewrite, node_rewrite
from .gpu_layers import put_skip_norm

_HEADS_FIRST = [0, 2, 1, 3]


@node_rewrite("SimplifiedLayerNormalization")
def fuse_skip_rms_norms(norm: ir.Node) -> bool:
    """Residual sum and RMSNorm as `SkipSimplifiedLayerNormalization`."""
    add = producer(norm.inputs[0], "Add")
    sizes = dims(norm.outputs[0])
    if add is None or sizes is None or len(sizes) != 3 or any(output.uses() for output in norm.outputs[1:]):
        return False
    if any(dims(term) != sizes for term in add.inputs) or add.outputs[0].is_graph_output():
        return False
    put_skip_norm(add, norm, "SkipSimplifiedLayerNormalization", [*add.inputs, norm.inputs[1]])
    return True


@graph_rewrite
def cancel_transposes(model: ir.Model) -> int:
    """`(batch, length, heads, depth)` to heads first and back, and the split and merge around that, left out."""
    count = 0
    for outer in nodes(model, "Transpose"):
        inner = producer(outer.inputs[0], "Transpose")
        if inner is None or any(list(n.attributes.get_ints("perm", [])) != _HEADS_FIRST for n in (inner, outer)):
            continue
        kept = inner.inputs[0]
        assert kept is not None
        replace_value(outer.outputs[0], kept)
        count += 1
    passes.RemoveUnusedNodesPass()(model)
    for merge in nodes(model, "Reshape"):
        split = producer(merge.inputs[0], "Reshape")
        source = split.inputs[0] if split is not None else None
        if source is None or dims(source) is None or dims(source) != dims(merge.outputs[0]):
            continue
        replace_value(merge.outputs[0], source)
        count += 1
    return count


@graph_rewrite
def merge_products(model: ir.Model) -> int:
    """Products of one value with several constant matrices, and their biases, as one product and a `Split`.

    For decoders, whose single tokens leave the GPU waiting for launches: query, key and value, gate and up projection.
    """
    if not any(True for _ in nodes(model, "GroupQueryAttention", domain=MICROSOFT)):
        return 0
    groups: dict[tuple[int, int], list[_Linear]] = {}
    for product in nodes(model, "MatMul"):
        linear = _linear(product)
        if linear is not None:
            groups.setdefault((id(product.graph), id(product.inputs[0])), []).append(linear)
    count = 0
    for group in groups.values():
        if len(group) > 1 and len({linear.weight.shape[0] for linear in group}) == 1:
            _merge(group)
            count += len(group)
    return count


@dataclass(frozen=True, slots=True)
class _Linear:
    """`x @ weight + bias`; `weight: (inner, outer)`, `bias: (outer,)` or `None`."""

    product: ir.Node
    weight: np.ndarray
    bias: np.ndarray | None
    end: ir.Node


def _linear(product: ir.Node) -> _Linear | None:
    value = product.inputs[1]
    sizes = dims(product.inputs[0])
    weight = constant(value) if value is not None and len(value.uses()) == 1 else None
    if weight is None or weight.ndim != 2 or sizes is None or len(sizes) != 3:
        return None
    add = only_user(product.outputs[0])
    if add is not None and add.op_type == "Add" and not add.domain:
        other = add.inputs[1] if add.inputs[0] is product.outputs[0] else add.inputs[0]
        bias = constant(other)
        if bias is not None and bias.shape == weight.shape[1:]:
            return _Linear(product, weight, bias, add)
    return _Linear(product, weight, None, product) if not product.outputs[0].is_graph_output() else None


def _merge(group: Sequence[_Linear]) -> None:
    first = group[0].product
    graph = root_graph(first)
    x = first.inputs[0]
    assert x is not None
    assert x.shape is not None
    widths = [linear.weight.shape[1] for linear in group]
    shape = ir.Shape([x.shape[0], x.shape[1], sum(widths)])
    weight = add_initializer(graph, f"{first.name}.merged", np.concatenate([one.weight for one in group], axis=1))
    made = [ir.node("MatMul", [x, weight], name=f"{first.name}.product")]
    if any(linear.bias is not None for linear in group):
        parts = [np.zeros(len(one.weight[0]), one.weight.dtype) if one.bias is None else one.bias for one in group]
        bias = add_initializer(graph, f"{first.name}.merged_bias", np.concatenate(parts))
        made.append(ir.node("Add", [made[0].outputs[0], bias], name=f"{first.name}.biased"))
    for node in made:
        node.outputs[0].type, node.outputs[0].shape = first.outputs[0].type, shape
    sizes = add_initializer(graph, f"{first.name}.widths", np.array(widths, np.int64))
    split = ir.node(
        "Split", [made[-1].outputs[0], sizes], {"axis": -1}, num_outputs=len(group), name=f"{first.name}.split"
    )
    graph.insert_before(first, [*made, split])
    for linear, part in zip(group, split.outputs, strict=True):
        end = linear.end.outputs[0]
        part.type, part.shape = end.type, end.shape
        replace_value(end, part)
