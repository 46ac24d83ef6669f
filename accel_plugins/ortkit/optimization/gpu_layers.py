"""Normalisations and activations as single operators."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ..graph.analysis import dims, only_user, producer
from ..graph.editing import MICROSOFT, constant, nodes, replace_node, replace_value, root_graph
from ..graph.rewrites import graph_rewrite, node_rewrite


def _like(value: ir.Value, other: ir.Value) -> None:
    value.type, value.shape = other.type, other.shape


def _feeds_only(value: ir.Value, node: ir.Node) -> bool:
    """Whether nothing but this node reads the value."""
    return only_user(value) is node


def _bias(node: ir.Node | None) -> tuple[ir.Value, ir.Value] | None:
    """The other operand and the vector when a node adds a constant vector."""
    if node is None:
        return None
    for one, other in ((0, 1), (1, 0)):
        value, vector = node.inputs[one], node.inputs[other]
        if value is not None and vector is not None and constant(vector) is not None and len(dims(vector) or ()) == 1:
            return value, vector
    return None


# Normalisations and activations


@node_rewrite("LayerNormalization")
def fuse_skip_norms(norm: ir.Node) -> bool:
    """Bias, residual sum and normalisation as `SkipLayerNormalization`."""
    add = producer(norm.inputs[0], "Add")
    sizes = dims(norm.outputs[0])
    if add is None or sizes is None or len(sizes) != 3 or norm.attributes.get_int("axis", -1) not in (-1, 2):
        return False
    if len(norm.inputs) < 3 or norm.inputs[2] is None or any(output.uses() for output in norm.outputs[1:]):
        return False
    one, two = add.inputs
    if one is None or two is None or dims(one) != sizes or dims(two) != sizes:
        return False
    bias = None
    for left, right in ((one, two), (two, one)):
        found = _bias(producer(left, "Add"))
        if found is not None and _feeds_only(left, add):
            (one, bias), two = found, right
            break
    if add.outputs[0].is_graph_output():
        return False
    put_skip_norm(add, norm, "SkipLayerNormalization", [one, two, norm.inputs[1], norm.inputs[2], bias])
    return True


def put_skip_norm(add: ir.Node, norm: ir.Node, operator: str, inputs: Sequence[ir.Value | None]) -> None:
    """Put one operator of ONNX Runtime's own in the place of a sum and the normalisation behind it.

    Args:
        add: The sum, which is no graph output.
        norm: Its normalisation.
        operator: Takes both; its fourth output is the sum.
        inputs: What it takes.
    """
    total = add.outputs[0]
    shared = len(total.uses()) > 1
    fused = ir.node(
        operator,
        inputs,
        {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
        num_outputs=4 if shared else 1,
        domain=MICROSOFT,
        name=f"{norm.name}.skip",
    )
    _like(fused.outputs[0], norm.outputs[0])
    graph = root_graph(norm)
    # Where the sum was: it may be read before the normalisation stands in the graph.
    graph.insert_after(add, fused)
    replace_value(norm.outputs[0], fused.outputs[0])
    graph.remove(norm, safe=True)
    if shared:
        # Mean and inverse deviation are not computed at inference.
        for output in fused.outputs[1:3]:
            output.name = ""
        _like(fused.outputs[3], total)
        replace_value(total, fused.outputs[3])


@node_rewrite("Gelu")
def fuse_bias_gelus(gelu: ir.Node) -> bool:
    """Bias and `Gelu` as `BiasGelu` (exact) or `FastGelu` (where the model itself uses the tanh form)."""
    tanh = gelu.attributes.get_string("approximate", "none") == "tanh"
    value = gelu.inputs[0]
    found = _bias(producer(value, "Add"))
    if value is None or found is None or not _feeds_only(value, gelu):
        return False
    operator = "FastGelu" if tanh else "BiasGelu"
    replace_node(gelu, ir.node(operator, list(found), domain=MICROSOFT, name=f"{gelu.name}.bias"))
    return True


@graph_rewrite
def approximate_gelus(model: ir.Model) -> int:
    """`FastGelu`, the tanh form, for the exact one: at most 5e-4 off (Hendrycks and Gimpel, 2016)."""
    count = 0
    for node in (*nodes(model, "BiasGelu", domain=MICROSOFT), *nodes(model, "Gelu")):
        replace_node(node, ir.node("FastGelu", list(node.inputs), domain=MICROSOFT, name=f"{node.name}.fast"))
        count += 1
    return count
