"""Half precision: graphs converted to float16 or bfloat16, except for what the data shows must stay float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.artifact import Component
from accel.backends.interfaces import Feeds

from ..graph.editing import add_initializer, constant
from ..quantization.calibrators import Calibrator
from .simplifications import infer_shapes

_FLOAT = ir.DataType.FLOAT
_TARGETS: Mapping[str, tuple[ir.DataType, Any, float]] = {
    "float16": (ir.DataType.FLOAT16, np.float16, 65504.0),
    "bfloat16": (ir.DataType.BFLOAT16, ml_dtypes.bfloat16, 3.38e38),
}
# Constants beyond this are fills that stand for minus infinity, such as a mask's; the smallest finite value does as well.
_FILL = 1e30


def clamp_fills(model: ir.Model, dtype: str) -> int:
    """Replace huge constants by half of a dtype's largest value, so that a score added to one stays in range; returns
    how many.
    """
    limit, count = _TARGETS[dtype][2] / 2, 0
    for graph in model.graphs():
        for value in list(graph.initializers.values()):
            array = (
                constant(value) if value.dtype == _FLOAT and (value.shape is None or value.shape.rank() == 0) else None
            )
            if array is not None and limit < _FILL and np.isfinite(array).all() and (np.abs(array) > _FILL).any():
                replacement = add_initializer(
                    model.graph, f"{value.name}.clamped", np.clip(array, -limit, limit).astype(np.float32)
                )
                value.replace_all_uses_with(replacement)
                count += 1
    return count


def values_out_of_range(
    watched: ir.Model, component: Component, batches: Iterable[Feeds], dtype: str
) -> frozenset[str]:
    """Names of the values that leave a dtype's range, or are not finite, on the given inputs.

    Args:
        watched: A copy of the graph that is used for nothing else.
        component: Its inputs.
        batches: What to run it on.
        dtype: `float16` or `bfloat16`.
    """
    names = [
        str(value.name)
        for node in watched.graph
        for value in node.outputs
        if value.name and value.dtype == _FLOAT and value.uses()
    ]
    limit = _TARGETS[dtype][2]
    with Calibrator(watched, component, names, batches, samples=1 << 30) as calibrator:
        return calibrator.beyond(limit)


def to_half(model: ir.Model, dtype: str, out_of_range: frozenset[str]) -> dict[str, Any]:
    """Convert the main graph; inputs and outputs keep their types.

    What makes or reads a value in `out_of_range` stays float32, and so does what has no half-precision form or holds a
    subgraph.

    Returns:
        How many nodes were converted, and the names of those kept.
    """
    infer_shapes(model)
    target, numpy_type, _ = _TARGETS[dtype]
    graph = model.graph
    opset = model.opset_imports.get("") or 18
    kept = {id(node) for node in graph if _stays(node, out_of_range, opset, target)}
    names = [str(node.name) for node in graph if id(node) in kept and _touches_float(node)]
    is_float = {id(v) for node in graph for v in node.outputs if v.dtype == _FLOAT}
    # Values as the other precision, made once.
    halves: dict[int, ir.Value] = {}
    singles: dict[int, ir.Value] = {}
    converted = {id(v) for node in graph if id(node) not in kept for v in node.outputs if id(v) in is_float}

    def as_half(value: ir.Value, before: ir.Node) -> ir.Value:
        if id(value) not in halves:
            array = constant(value)
            if array is not None:
                halves[id(value)] = add_initializer(graph, f"{value.name}.{dtype}", array.astype(numpy_type))
            else:
                halves[id(value)] = _cast(graph, value, target, before)
        return halves[id(value)]

    def as_single(value: ir.Value, before: ir.Node) -> ir.Value:
        if id(value) not in singles:
            singles[id(value)] = _cast(graph, value, _FLOAT, before)
        return singles[id(value)]

    for node in list(graph):
        half = id(node) not in kept
        for index, value in enumerate(node.inputs):
            if value is None or (value.dtype != _FLOAT and id(value) not in converted):
                continue
            if half and id(value) not in converted:
                node.replace_input_with(index, as_half(value, node))
            elif not half and id(value) in converted:
                node.replace_input_with(index, as_single(value, node))
        if half:
            _convert_attributes(node, target, numpy_type)
            for value in node.outputs:
                if id(value) in converted:
                    value.type = ir.TensorType(target)
    _keep_outside(graph, converted, as_single)
    passes.RemoveUnusedNodesPass()(model)
    return {"converted": sum(id(node) not in kept and _touches_half(node, target) for node in graph), "kept": names}


def _stays(node: ir.Node, out_of_range: frozenset[str], opset: int, target: ir.DataType) -> bool:
    if any(value is not None and value.name in out_of_range for value in (*node.inputs, *node.outputs)):
        return True
    if any(attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values()):
        return True
    return not node.domain and not _has_half_form(node, opset, target)


def _has_half_form(node: ir.Node, opset: int, target: ir.DataType) -> bool:
    """Whether the operator takes and makes the type wherever this node has floats."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return True
    wanted = f"tensor({target.name.lower()})"
    for values, formal in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, value in enumerate(values):
            is_float = value is not None and value.dtype == _FLOAT
            if is_float and formal and wanted not in formal[min(index, len(formal) - 1)].types:
                return False
    return True


def _touches_float(node: ir.Node) -> bool:
    return any(value is not None and value.dtype == _FLOAT for value in (*node.inputs, *node.outputs))


def _touches_half(node: ir.Node, target: ir.DataType) -> bool:
    return node.op_type != "Cast" and any(value.dtype == target for value in node.outputs)


def _cast(graph: ir.Graph, value: ir.Value, dtype: ir.DataType, before: ir.Node) -> ir.Value:
    node = ir.node("Cast", [value], {"to": dtype}, name=f"{value.name}.to_{dtype.name.lower()}")
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(dtype), value.shape
    producer = value.producer()
    if producer is not None and producer.graph is graph:
        graph.insert_after(producer, node)
    else:
        graph.insert_before(graph[0] if len(graph) else before, node)
    return node.outputs[0]


def _convert_attributes(node: ir.Node, target: ir.DataType, numpy_type: Any) -> None:
    """The attributes that name or hold the element type."""
    if node.op_type == "Cast" and node.attributes.get_int("to", 0) == int(_FLOAT):
        node.attributes["to"] = ir.AttrInt64("to", int(target))
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _FLOAT:
            array = attribute.as_tensor().numpy().astype(numpy_type)
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(array))


def _keep_outside(graph: ir.Graph, converted: set[int], as_single: Any) -> None:
    """Graph outputs, and what subgraphs read from here, stay float32."""
    for index, value in enumerate(list(graph.outputs)):
        producer = value.producer()
        if id(value) not in converted or producer is None:
            continue
        name, single = value.name, as_single(value, producer)
        graph.outputs[index] = single
        value.name, single.name = f"{name}.half", name
    for node in list(graph):
        for value in node.outputs:
            if id(value) in converted:
                for use in list(value.uses()):
                    if use.node.graph is not graph:
                        use.node.replace_input_with(use.idx, as_single(value, node))
