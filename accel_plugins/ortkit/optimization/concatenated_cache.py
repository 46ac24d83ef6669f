"""Decoder graphs whose attention is spelled out, for kernels that have no `GroupQueryAttention` with a bias.

ONNX Runtime's CUDA kernel of that operator takes no bias, and none of its kernels for GPUs computes float32. In this form
keys and values are put behind the past, a longer tensor at each call, and attention is products and a `Softmax`: every bias
that a model has is added as it is. It costs a copy of the cache at each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.artifact import Component, TensorSpec
from accel.errors import SessionError

from ..graph.editing import MICROSOFT, add_initializer, nodes, read_graph, replace_value, root_graph

_QUERY, _KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _BIAS, _SINKS = 0, 1, 2, 3, 4, 10, 11
_READ = {_QUERY, _KEY, _VALUE, _PAST_KEY, _PAST_VALUE, 5, 6, _BIAS, _SINKS}  # 5 and 6 are lengths, which the bias tells
_ATTRIBUTES = {"num_heads", "kv_num_heads", "scale", "softcap"}
_TOKENS = 2
"""The axis of keys and values that grows: `(batch, heads, tokens, size)`."""


@dataclass(frozen=True, slots=True)
class GrowingForm:
    """A decoder graph that returns a longer cache at each call.

    Attributes:
        model: The serialized graph; its weights stay in the files beside the original.
        component: What it takes and returns.
    """

    model: bytes
    component: Component


def growing_form(path: Path, component: Component) -> GrowingForm:
    """The decoder graph of a file in this form.

    Raises:
        SessionError: An attention that computes more than this form spells out.
    """
    model = read_graph(path)
    grown: set[str] = set()
    for node in nodes(model, "GroupQueryAttention", domain=MICROSOFT):
        _check(node, path.name)
        grown |= {str(node.inputs[i].name) for i in (_PAST_KEY, _PAST_VALUE)}
        _spell_out(node)
    passes.RemoveUnusedNodesPass()(model)
    presents = {spec.pair for spec in component.inputs if spec.name in grown}
    axes = {**dict.fromkeys(grown, "past"), **dict.fromkeys(filter(None, presents), "total")}
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name in axes and value.shape is not None:
            value.shape = ir.Shape([axes[value.name] if i == _TOKENS else size for i, size in enumerate(value.shape)])
    serialized: bytes = ir.to_proto(model).SerializeToString()
    described = replace(component, inputs=_sized(component.inputs, axes), outputs=_sized(component.outputs, axes))
    return GrowingForm(serialized, described)


def _sized(specs: tuple[TensorSpec, ...], axes: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    return tuple(
        replace(spec, shape=(*spec.shape[:_TOKENS], axes[spec.name], *spec.shape[_TOKENS + 1 :]))
        if spec.name in axes
        else spec
        for spec in specs
    )


def _check(node: ir.Node, name: str) -> None:
    """That an attention says what this form can say.

    Raises:
        SessionError: It does not.
    """
    given = {i for i, value in enumerate(node.inputs) if value is not None}
    pasts = [node.inputs[i] if i in given else None for i in (_PAST_KEY, _PAST_VALUE)]
    kept = all(past is not None and past.is_graph_input() for past in pasts)
    needed = {_QUERY, _KEY, _VALUE, _BIAS} <= given <= _READ
    attributes = {key for key, value in node.attributes.items() if key in _ATTRIBUTES or value.value}
    if not (kept and needed and attributes <= _ATTRIBUTES):
        raise SessionError(
            f"An attention of {name} ({node.name}) cannot be spelled out for the GPU.",
            fix="open it on the CPU: backend='cpu'.",
        )


def _spell_out(node: ir.Node) -> None:
    """Replace `GroupQueryAttention` by concatenation, two products and a `Softmax`."""
    graph, name = root_graph(node), str(node.name)
    heads, kv_heads = node.attributes.get_int("num_heads", 0), node.attributes.get_int("kv_num_heads", 0)
    past = node.inputs[_PAST_KEY]
    assert past is not None
    assert past.shape is not None
    size = past.shape[3]
    assert isinstance(size, int)
    scale = node.attributes.get_float("scale", 0.0) or size**-0.5
    cap = node.attributes.get_float("softcap", 0.0)
    query_type = node.inputs[_QUERY].dtype
    assert query_type is not None
    made: list[ir.Node] = []

    def op(operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        made.append(ir.node(operator, inputs, attributes, name=f"{name}.spelled_out_{len(made)}"))
        return made[-1].outputs[0]

    def number(value: float, dtype: ir.DataType) -> ir.Value:
        return add_initializer(graph, f"{name}.number", np.asarray(value, dtype.numpy()))

    def sizes(*values: int) -> ir.Value:
        return add_initializer(graph, f"{name}.sizes", np.array(values, np.int64))

    def by_head(value: ir.Value | None, count: int) -> ir.Value:
        split = op("Reshape", value, sizes(0, 0, count, size))
        return op("Transpose", split, perm=[0, 2, 1, 3])

    def of_query_heads(value: ir.Value) -> ir.Value:
        if heads == kv_heads:
            return value
        apart = op("Unsqueeze", value, sizes(2))
        repeated = op("Expand", apart, sizes(1, 1, heads // kv_heads, 1, 1))
        return op("Reshape", repeated, sizes(0, heads, -1, size))

    query = op("Mul", by_head(node.inputs[_QUERY], heads), number(scale, query_type))
    held = []
    for new, before in ((_KEY, _PAST_KEY), (_VALUE, _PAST_VALUE)):
        held.append(op("Concat", node.inputs[before], by_head(node.inputs[new], kv_heads), axis=_TOKENS))
    key, value = map(of_query_heads, held)
    scores = op("MatMul", query, op("Transpose", key, perm=[0, 1, 3, 2]))
    if cap:
        scores = op("Mul", op("Tanh", op("Div", scores, number(cap, query_type))), number(cap, query_type))
    scores = op("Add", scores, node.inputs[_BIAS])
    weights = op("Softmax", scores, axis=-1)
    if len(node.inputs) > _SINKS and node.inputs[_SINKS] is not None:
        # A sink takes its share of the sum that weights are divided by: they shrink by a logistic function of it.
        total = op("ReduceLogSumExp", op("Cast", scores, to=ir.DataType.FLOAT), sizes(-1), keepdims=1)
        sink = op("Reshape", op("Cast", node.inputs[_SINKS], to=ir.DataType.FLOAT), sizes(1, heads, 1, 1))
        share = op("Sigmoid", op("Sub", total, sink))
        weights = op("Mul", weights, op("Cast", share, to=query_type))
    merged = op("Transpose", op("MatMul", weights, value), perm=[0, 2, 1, 3])
    result = op("Reshape", merged, sizes(0, 0, heads * size))
    graph.insert_before(node, made)
    for old, new in zip(node.outputs, (result, *held), strict=False):
        new.type = old.type
        replace_value(old, new)
    graph.remove(node, safe=True)
