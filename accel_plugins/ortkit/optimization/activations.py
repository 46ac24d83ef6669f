"""Norms and activations written in many operators, as the one operator that they are."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ..graph.analysis import dims, producer
from ..graph.editing import MICROSOFT, constant, nodes, replace_node, scalar
from ..graph.rewrites import graph_rewrite, node_rewrite

_TANH_GELU_OPSET = 20


def _constant_operand(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The computed and the constant operand of a commutative operator."""
    left, right = node.inputs
    if left is None or right is None:
        return None
    if constant(right) is not None:
        return left, right
    return (right, left) if constant(left) is not None else None


def _is_last_axis(node: ir.Node, value: ir.Value) -> bool:
    """Whether a reduction runs over the last axis and keeps it."""
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else np.array(node.attributes.get_ints("axes", []))
    rank = len(dims(value) or ())
    if axes is None or axes.size != 1 or node.attributes.get_int("keepdims", 1) != 1:
        return False
    return int(axes.reshape(())) in (-1, rank - 1)


def _square(value: ir.Value | None) -> ir.Value | None:
    """What a value is the square of."""
    power = producer(value, "Pow")
    if power is not None and scalar(power.inputs[1]) == 2.0:
        return power.inputs[0]
    product = producer(value, "Mul")
    return product.inputs[0] if product is not None and product.inputs[0] is product.inputs[1] else None


def _root_of_mean_square(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """`x` and epsilon, when the value is `sqrt(mean(x * x) + epsilon)` over the last axis."""
    root = producer(value, "Sqrt")
    added = producer(root.inputs[0], "Add") if root is not None else None
    operands = _constant_operand(added) if added is not None else None
    mean = producer(operands[0], "ReduceMean") if operands is not None else None
    source = _square(mean.inputs[0]) if mean is not None else None
    epsilon = scalar(operands[1]) if operands is not None else None
    if mean is None or source is None or epsilon is None or not _is_last_axis(mean, source):
        return None
    return source, epsilon


@node_rewrite("Mul")
def fuse_rms_norms(scaled: ir.Node) -> bool:
    """`x / sqrt(mean(x^2) + epsilon) * weight` as `SimplifiedLayerNormalization`, ONNX Runtime's name of RMSNorm."""
    operands = _constant_operand(scaled)
    if operands is None:
        return False
    normalized, weight = operands
    found = _match_rms(normalized)
    if found is None or dims(weight) != (dims(found[0]) or [])[-1:]:
        return False
    source, epsilon = found
    norm = ir.node(
        "SimplifiedLayerNormalization",
        [source, weight],
        {"axis": -1, "epsilon": epsilon, "stash_type": 1},
        name=f"{scaled.name}.rms_norm",
    )
    replace_node(scaled, norm)
    return True


def _match_rms(normalized: ir.Value) -> tuple[ir.Value, float] | None:
    """`x` and epsilon, when the value is `x / sqrt(mean(x * x) + epsilon)`."""
    divided = producer(normalized, "Div")
    if divided is not None:
        found = _root_of_mean_square(divided.inputs[1])
        return found if found is not None and found[0] is divided.inputs[0] else None
    product = producer(normalized, "Mul")
    for one, other in ((0, 1), (1, 0)) if product is not None else ():
        assert product is not None
        inverse = producer(product.inputs[other], "Reciprocal")
        found = _root_of_mean_square(inverse.inputs[0]) if inverse is not None else None
        if found is not None and found[0] is product.inputs[one]:
            return found
    return None


@node_rewrite("Add")
def fuse_layer_norms(shifted: ir.Node) -> bool:
    """`(x - mean) / sqrt(variance + epsilon) * weight + bias` as `LayerNormalization`, for graphs that spell it out."""
    outer = _constant_operand(shifted)
    scaled = producer(outer[0], "Mul") if outer is not None else None
    inner = _constant_operand(scaled) if scaled is not None else None
    divided = producer(inner[0], "Div") if inner is not None else None
    found = _root_of_mean_square(divided.inputs[1]) if divided is not None else None
    if outer is None or inner is None or divided is None or found is None or found[0] is not divided.inputs[0]:
        return False
    centered = producer(found[0], "Sub")
    mean = producer(centered.inputs[1], "ReduceMean") if centered is not None else None
    source = centered.inputs[0] if centered is not None else None
    if mean is None or source is None or mean.inputs[0] is not source or not _is_last_axis(mean, source):
        return False
    width = (dims(source) or [])[-1:]
    if not width or any(dims(value) != width for value in (inner[1], outer[1])):
        return False
    norm = ir.node(
        "LayerNormalization",
        [source, inner[1], outer[1]],
        {"axis": -1, "epsilon": found[1], "stash_type": 1},
        name=f"{shifted.name}.layer_norm",
    )
    replace_node(shifted, norm)
    return True


@graph_rewrite
def fuse_gelus(model: ir.Model) -> int:
    """`0.5 * x * (1 + erf(x / sqrt(2)))`, in any order, as `Gelu`."""
    count = 0
    for error in nodes(model, "Erf"):
        argument = error.inputs[0].producer() if error.inputs[0] is not None else None
        if argument is None or argument.op_type not in ("Div", "Mul"):
            continue
        operands = _constant_operand(argument) if argument.op_type == "Mul" else argument.inputs
        factor = scalar(operands[1]) if operands is not None else None
        if operands is None or factor is None:
            continue
        factor = factor if argument.op_type == "Mul" else 1 / factor
        source = operands[0]
        end = _gelu_end(error, source) if source is not None and math.isclose(factor, 0.5**0.5, rel_tol=1e-4) else None
        if end is None or source is None:
            continue
        if (model.opset_imports.get("") or 0) >= _TANH_GELU_OPSET:
            gelu = ir.node("Gelu", [source], {"approximate": "none"}, name=f"{error.name}.gelu")
        else:
            gelu = ir.node("Gelu", [source], domain=MICROSOFT, name=f"{error.name}.gelu")
        replace_node(end, gelu)
        count += 1
    return count


def _gelu_end(error: ir.Node, source: ir.Value) -> ir.Node | None:
    """The last product of a GELU: `1 + erf(...)` times `x` times 0.5, the two factors in any order."""
    uses = error.outputs[0].uses()
    added = uses[0].node if len(uses) == 1 else None
    if added is None or added.op_type != "Add" or 1.0 not in (scalar(added.inputs[0]), scalar(added.inputs[1])):
        return None
    value, half, multiplied = added.outputs[0], False, False
    node = added
    for _ in range(2):
        readers = value.uses()
        if len(readers) != 1 or readers[0].node.op_type != "Mul":
            return None
        node = readers[0].node
        other = node.inputs[1 - readers[0].idx]
        inner = producer(other, "Mul")
        operands = _constant_operand(inner) if inner is not None else None
        if other is source and not multiplied:
            multiplied = True
        elif scalar(other) == 0.5 and not half:
            half = True
        elif operands is not None and operands[0] is source and scalar(operands[1]) == 0.5 and not (half or multiplied):
            half = multiplied = True
        else:
            return None
        value = node.outputs[0]
        if half and multiplied:
            return node
    return None


@graph_rewrite
def fuse_silus(model: ir.Model) -> int:
    """`x * sigmoid(x)` as `QuickGelu` with a factor of 1."""
    count = 0
    for product in nodes(model, "Mul"):
        for one, other in ((0, 1), (1, 0)):
            sigmoid = producer(product.inputs[other], "Sigmoid")
            if sigmoid is not None and sigmoid.inputs[0] is product.inputs[one]:
                silu = ir.node(
                    "QuickGelu", [sigmoid.inputs[0]], {"alpha": 1.0}, domain=MICROSOFT, name=f"{product.name}.silu"
                )
                replace_node(product, silu)
                count += 1
                break
    return count


@graph_rewrite
def approximate_gelus(model: ir.Model) -> int:
    """Exact GELU by its tanh form (Hendrycks and Gimpel, 2016): differs by up to 5e-4."""
    count = 0
    exact = [n for n in nodes(model, "Gelu") if n.attributes.get_string("approximate", "none") == "none"]
    for node in [*exact, *nodes(model, "Gelu", domain=MICROSOFT)]:
        if node.domain == MICROSOFT:
            replace_node(node, ir.node("FastGelu", [node.inputs[0]], domain=MICROSOFT, name=f"{node.name}.fast"))
        else:
            node.attributes["approximate"] = ir.AttrString("approximate", "tanh")
        count += 1
    return count
