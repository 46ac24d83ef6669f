"""Fusion that computes the layers after the last attention only for the token that the model's head reads (`[CLS]`)."""

from __future__ import annotations

import onnx_ir as ir

from ..graph.analysis import dims
from ..graph.editing import MICROSOFT, is_constant, nodes, replace_value, root_graph, scalar
from ..graph.rewrites import graph_rewrite

_TOKENWISE = {
    ("", "LayerNormalization"): (0,),
    ("", "MatMul"): (0,),
    ("", "Add"): (0, 1),
    **{("", name): (0, 1) for name in ("Sub", "Mul", "Div", "Pow")},
    **{
        ("", name): (0,) for name in ("Gelu", "Tanh", "Relu", "Erf", "Sigmoid", "Exp", "Sqrt", "Neg", "Abs", "Softplus")
    },
    **{("", name): (0,) for name in ("Swish", "Mish", "HardSigmoid", "HardSwish", "Elu", "Selu", "LeakyRelu", "Cast")},
    (MICROSOFT, "SkipLayerNormalization"): (0, 1),
    **{(MICROSOFT, name): (0,) for name in ("BiasGelu", "FastGelu", "QuickGelu", "Gelu")},
}
"""Operators that compute each token independently, with the indices of the inputs that hold tokens."""


@graph_rewrite
def compute_pooled_token(model: ir.Model) -> int:
    """Select the token that the model's head reads before the last layer's products instead of after them.

    If the head reads only one token of the last hidden state (`[CLS]`), the graph computes all operators after the last
    attention for this token alone. The rewrite saves 6 % of the arithmetic of an encoder with 12 layers, and 12 % of an
    encoder with 6 layers.
    """
    count = 0
    for gather in nodes(model, "Gather"):
        value, index = gather.inputs[0], scalar(gather.inputs[1])
        if value is None or index is None or gather.attributes.get_int("axis", 0) != 1:
            continue
        if len(dims(value) or ()) != 3 or dims(gather.inputs[1]) != []:
            continue
        movable = _movable(gather)
        if movable:
            _move(gather, movable)
            count += len(movable)
    return count


def token_inputs(node: ir.Node, *, more_outputs: bool = False) -> list[int]:
    """Return the indices of the inputs that contain one vector for each token.

    The list is empty if the node combines different tokens.

    Args:
        node: The node.
        more_outputs: Whether other nodes may read the second and later outputs of the node.
    """
    positions = []
    for position in _TOKENWISE.get((node.domain, node.op_type), ()):
        value = node.inputs[position] if position < len(node.inputs) else None
        sizes = dims(value)
        if value is None or (is_constant(value) and len(sizes or ()) <= 1):
            continue
        if sizes is None or len(sizes) != 3:
            return []
        positions.append(position)
    if node.op_type == "MatMul" and (not is_constant(node.inputs[1]) or len(dims(node.inputs[1]) or ()) != 2):
        return []
    if node.op_type == "LayerNormalization" and node.attributes.get_int("axis", -1) not in (-1, 2):
        return []
    if not more_outputs and any(output.uses() for output in node.outputs[1:]):
        return []
    result = dims(node.outputs[0])
    if any((dims(node.inputs[p]) or [])[:2] != (result or [])[:2] for p in positions):
        return []
    return positions


def _movable(gather: ir.Node) -> dict[int, ir.Node]:
    """Return the nodes before `gather`, by id, that can be computed for the selected token alone.

    No node outside of the result, except `gather`, reads the outputs of these nodes.
    """
    candidates: dict[int, ir.Node] = {}
    waiting = [gather.inputs[0]]
    while waiting:
        value = waiting.pop()
        node = value.producer() if value is not None else None
        if node is None or id(node) in candidates:
            continue
        positions = token_inputs(node)
        if positions:
            candidates[id(node)] = node
            waiting += [node.inputs[p] for p in positions]
    while True:
        outside = [
            key
            for key, node in candidates.items()
            if node.outputs[0].is_graph_output()
            or any(use.node is not gather and id(use.node) not in candidates for use in node.outputs[0].uses())
        ]
        if not outside:
            return candidates
        for key in outside:
            del candidates[key]


def _move(gather: ir.Node, moved: dict[int, ir.Node]) -> None:
    graph = root_graph(gather)
    index = gather.inputs[1]
    token_values: dict[int, ir.Value] = {}

    def one_token(value: ir.Value) -> ir.Value:
        if id(value) in token_values:
            return token_values[id(value)]
        node = value.producer()
        if node is not None and id(node) in moved:
            inputs: list[ir.Value | None] = list(node.inputs)
            for position in token_inputs(node):
                source = inputs[position]
                assert source is not None
                inputs[position] = one_token(source)
            attributes = [
                ir.AttrInt64("axis", -1) if a.name == "axis" and node.op_type == "LayerNormalization" else a
                for a in node.attributes.values()
            ]
            moved_node = ir.Node(
                node.domain, node.op_type, inputs, attributes, num_outputs=1, name=f"{node.name}.token"
            )
        else:
            moved_node = ir.node("Gather", [value, index], {"axis": 1}, name=f"{value.name}.token")
        result = moved_node.outputs[0]
        result.type = value.type
        assert value.shape is not None
        result.shape = ir.Shape([value.shape[0], value.shape[2]])
        graph.insert_before(gather, moved_node)
        token_values[id(value)] = result
        return result

    assert gather.inputs[0] is not None
    replace_value(gather.outputs[0], one_token(gather.inputs[0]))
    graph.remove(gather, safe=True)
