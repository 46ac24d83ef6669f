"""Fusions of normalization layers into single operators, including the preceding residual sum where kernels support it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ..graph.analysis import constant_term, dims, only_user, producer
from ..graph.editing import MICROSOFT, replace_value, root_graph, scalar
from ..graph.rewrites import graph_rewrite, node_rewrite


@graph_rewrite
def fuse_rms_norms(model: ir.Model) -> int:
    """Fuse `x / sqrt(mean(x^2) + epsilon) * weight` into `SimplifiedLayerNormalization`, ONNX Runtime's RMSNorm operator."""
    return int(_rms_rules().apply_to_model(model))


def _rms_rules() -> Any:
    # Create the rules for each graph: a rule of onnxscript (0.7) keeps the last graph and its weights in memory.
    from onnxscript.rewriter import pattern

    def spelled_out(op: Any, x: Any, weight: Any, epsilon: Any, axes: Any) -> Any:
        square = pattern.OrValue([op.Pow(x, 2.0), op.Mul(x, x)])
        deviation = op.Sqrt(op.Add(op.ReduceMean(square, axes, _outputs=["mean"]), epsilon))
        normalized = pattern.OrValue([op.Div(x, deviation), op.Mul(x, op.Reciprocal(deviation))])
        return op.Mul(normalized, weight)

    def fits(
        _: Any, x: ir.Value, weight: ir.Value, epsilon: ir.Value, axes: ir.Value, mean: ir.Value, **__: Any
    ) -> bool:
        sizes = dims(x)
        is_last_axis = sizes is not None and scalar(axes) in (-1, len(sizes) - 1)
        node = mean.producer()
        if node is None or node.attributes.get_int("keepdims", 1) != 1:
            return False
        return is_last_axis and scalar(epsilon) is not None and dims(weight) == (sizes or [])[-1:]

    def fused(op: Any, x: ir.Value, weight: ir.Value, epsilon: ir.Value, **_: Any) -> Any:
        return op.SimplifiedLayerNormalization(x, weight, axis=-1, epsilon=scalar(epsilon), stash_type=1)

    return pattern.RewriteRuleSet([pattern.RewriteRule(spelled_out, fused, fits, remove_nodes=False)], commute=True)


@node_rewrite("LayerNormalization")
def fuse_skip_norms(norm: ir.Node) -> bool:
    """Fuse bias, residual sum and layer normalization into `SkipLayerNormalization`."""
    if norm.attributes.get_int("axis", -1) not in (-1, 2) or len(norm.inputs) < 3 or norm.inputs[2] is None:
        return False
    add = _residual_sum(norm)
    if add is None:
        return False
    (first, second), bias = add.inputs, None
    for term_value, other_value in (add.inputs, reversed(add.inputs)):
        term = constant_term(producer(term_value, "Add"))
        if term is not None and only_user(term_value) is add:
            (first, bias), second = term, other_value
            break
    _put_skip_norm(add, norm, [first, second, norm.inputs[1], norm.inputs[2], bias])
    return True


@node_rewrite("SimplifiedLayerNormalization")
def fuse_skip_rms_norms(norm: ir.Node) -> bool:
    """Fuse residual sum and RMSNorm into `SkipSimplifiedLayerNormalization`."""
    add = _residual_sum(norm)
    if add is None:
        return False
    _put_skip_norm(add, norm, [*add.inputs, norm.inputs[1]])
    return True


def _residual_sum(norm: ir.Node) -> ir.Node | None:
    """Return the `Add` node before a normalization if both terms have the shape `(batch, length, hidden)`, else `None`."""
    add, sizes = producer(norm.inputs[0], "Add"), dims(norm.outputs[0])
    if add is None or sizes is None or len(sizes) != 3 or any(output.uses() for output in norm.outputs[1:]):
        return None
    return None if add.outputs[0].is_graph_output() or any(dims(term) != sizes for term in add.inputs) else add


def _put_skip_norm(add: ir.Node, norm: ir.Node, inputs: Sequence[ir.Value | None]) -> None:
    """Replace a sum and its normalization by ONNX Runtime's fused operator, whose fourth output is the sum."""
    total, shared = add.outputs[0], len(add.outputs[0].uses()) > 1
    fused = ir.node(
        f"Skip{norm.op_type}",
        inputs,
        {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
        num_outputs=4 if shared else 1,
        domain=MICROSOFT,
        name=f"{norm.name}.skip",
    )
    graph = root_graph(norm)
    # Insert the fused node directly after the sum: nodes between the sum and the normalization may read the sum.
    graph.insert_after(add, fused)
    replace_value(norm.outputs[0], fused.outputs[0])
    graph.remove(norm, safe=True)
    if shared:
        # ONNX Runtime does not compute outputs 1 and 2 (mean and inverse standard deviation) at inference. An empty
        # name means that an output is not used.
        for output in fused.outputs[1:3]:
            output.name = ""
        replace_value(total, fused.outputs[3])
