"""Decoder graphs with attention as basic operators, for providers whose `GroupQueryAttention` kernel accepts no bias.

ONNX Runtime's CUDA kernel of `GroupQueryAttention` does not accept a bias, and no GPU kernel of this operator computes
in float32. In the graphs that this module writes, new keys and values are concatenated to the past keys and values, so
the KV cache is a longer tensor after each call. The graph computes attention by `MatMul` and `Softmax`, and adds every
bias of the model unchanged. The cost is a copy of the KV cache for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.artifact import Component, TensorSpec
from accel.errors import SessionError

from ..graph.editing import MICROSOFT, NewNodes, nodes, read_graph, replace_value, root_graph, serialized

_QUERY, _KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _BIAS, _SINKS = 0, 1, 2, 3, 4, 10, 11
_READ = {
    _QUERY,
    _KEY,
    _VALUE,
    _PAST_KEY,
    _PAST_VALUE,
    5,
    6,
    _BIAS,
    _SINKS,
}  # Inputs 5 and 6 are row lengths; the bias contains the same information.
_ATTRIBUTES = {"num_heads", "kv_num_heads", "scale", "softcap"}
_TOKENS = 2
"""The token axis of keys and values `(batch, heads, tokens, size)`, which grows with each call."""


@dataclass(frozen=True, slots=True)
class GrowingCacheGraph:
    """A decoder graph that returns a longer KV cache at each call.

    Attributes:
        model: The serialized graph; its weights stay in the files next to the original.
        component: The component with the inputs and outputs of this graph.
    """

    model: bytes
    component: Component


def growing_form(path: Path, component: Component) -> GrowingCacheGraph:
    """Return the decoder graph of a file, rewritten to basic operators and a growing cache.

    Raises:
        SessionError: A `GroupQueryAttention` node has inputs or attributes that this module cannot replace.
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
    described = replace(component, inputs=_sized(component.inputs, axes), outputs=_sized(component.outputs, axes))
    return GrowingCacheGraph(serialized(model), described)


def _sized(specs: tuple[TensorSpec, ...], axes: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    return tuple(
        replace(spec, shape=(*spec.shape[:_TOKENS], axes[spec.name], *spec.shape[_TOKENS + 1 :]))
        if spec.name in axes
        else spec
        for spec in specs
    )


def _check(node: ir.Node, name: str) -> None:
    """Check that a `GroupQueryAttention` node can be replaced by basic operators.

    Raises:
        SessionError: The node has inputs or attributes that this module cannot replace.
    """
    present = {i for i, value in enumerate(node.inputs) if value is not None}
    past_values = [node.inputs[i] if i in present else None for i in (_PAST_KEY, _PAST_VALUE)]
    are_inputs = all(past is not None and past.is_graph_input() for past in past_values)
    has_supported_inputs = {_QUERY, _KEY, _VALUE, _BIAS} <= present <= _READ
    attributes = {key for key, value in node.attributes.items() if key in _ATTRIBUTES or value.value}
    if not (are_inputs and has_supported_inputs and attributes <= _ATTRIBUTES):
        raise SessionError(
            f"The GroupQueryAttention node {node.name} of {name} has inputs or attributes that accel cannot express in basic ONNX "
            "operators, which replace GroupQueryAttention on this GPU.",
            fix="run the model on the CPU: backend='cpu'.",
        )


def _spell_out(node: ir.Node) -> None:
    """Replace `GroupQueryAttention` by concatenation, two products and a `Softmax`."""
    graph = root_graph(node)
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
    new = NewNodes(graph, f"{node.name}.spelled_out")
    op, sizes = new.op, new.constant

    def number(value: float) -> ir.Value:
        return new.constant(value, query_type.numpy())

    def by_head(value: ir.Value | None, count: int) -> ir.Value:
        return op("Transpose", op("Reshape", value, sizes([0, 0, count, size])), perm=[0, 2, 1, 3])

    def of_query_heads(value: ir.Value) -> ir.Value:
        if heads == kv_heads:
            return value
        repeated = op("Expand", op("Unsqueeze", value, sizes([2])), sizes([1, 1, heads // kv_heads, 1, 1]))
        return op("Reshape", repeated, sizes([0, heads, -1, size]))

    query = op("Mul", by_head(node.inputs[_QUERY], heads), number(scale))
    present = []
    for new_index, past_index in ((_KEY, _PAST_KEY), (_VALUE, _PAST_VALUE)):
        present.append(op("Concat", node.inputs[past_index], by_head(node.inputs[new_index], kv_heads), axis=_TOKENS))
    key, value = map(of_query_heads, present)
    scores = op("MatMul", query, op("Transpose", key, perm=[0, 1, 3, 2]))
    if cap:
        scores = op("Mul", op("Tanh", op("Div", scores, number(cap))), number(cap))
    scores = op("Add", scores, node.inputs[_BIAS])
    weights = op("Softmax", scores, axis=-1)
    if len(node.inputs) > _SINKS and node.inputs[_SINKS] is not None:
        # An attention sink adds a term to the denominator of the softmax. This is the same as a multiplication of all
        # weights by sigmoid(total - sink).
        total = op("ReduceLogSumExp", op("Cast", scores, to=ir.DataType.FLOAT), sizes([-1]), keepdims=1)
        sink = op("Reshape", op("Cast", node.inputs[_SINKS], to=ir.DataType.FLOAT), sizes([1, heads, 1, 1]))
        factor = op("Sigmoid", op("Sub", total, sink))
        weights = op("Mul", weights, op("Cast", factor, to=query_type))
    merged = op("Transpose", op("MatMul", weights, value), perm=[0, 2, 1, 3])
    result = op("Reshape", merged, sizes([0, 0, heads * size]))
    graph.insert_before(node, new.nodes)
    for old, value in zip(node.outputs, (result, *present), strict=False):
        value.type = old.type
        replace_value(old, value)
    graph.remove(node, safe=True)
