"""float32 graphs in 16 bits, with float32 islands where sums or exponents need them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ..graph.editing import INTEGERS, MICROSOFT, nodes

_LIMITS = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 3.38e38}
"""Largest finite numbers. Constants beyond them (the large negative number of an additive mask) are cut to them."""
ISLANDS = ("ReduceSum", "ReduceMean", "ReduceL2", "ReduceSumSquare", "Pow", "Exp", "Log", "CumSum", "Range", "Resize")
"""Operators computed in float32: their intermediate values leave float16's range, or lose too many digits in it."""
_MOST_POSITION_NODES = 64


def to_float16(model: ir.Model) -> int:
    """Convert weights and operators to float16. Returns the number of weights.

    Inputs and outputs keep their types, except the buffers of a KV cache that attention writes in place.
    """
    return _convert(model, ir.DataType.FLOAT16)


def to_bfloat16(model: ir.Model) -> int:
    """The same to bfloat16."""
    return _convert(model, ir.DataType.BFLOAT16)


def _convert(model: ir.Model, dtype: ir.DataType) -> int:
    graph = model.graph
    positions = _position_nodes(model)
    for value in _cache_buffers(model):
        if value.dtype == ir.DataType.FLOAT:
            value.type = ir.TensorType(dtype)
    declared = {id(value): value.dtype for value in (*graph.inputs, *graph.outputs)}
    converted = 0
    for initializer in list(graph.initializers.values()):
        tensor = initializer.const_value
        if tensor is None or tensor.dtype != ir.DataType.FLOAT:
            continue
        if initializer.uses() and all(id(use.node) in positions for use in initializer.uses()):
            continue
        initializer.const_value = _narrow(tensor.numpy(), dtype, str(initializer.name))
        initializer.type = ir.TensorType(dtype)
        converted += 1
    for inner in model.graphs():
        for node in inner:
            if id(node) in positions:
                continue
            _convert_attributes(node, dtype)
            for output in node.outputs:
                if output.dtype == ir.DataType.FLOAT:
                    output.type = ir.TensorType(dtype)
    for node in nodes(model, *ISLANDS):
        _make_island(node, dtype)
    for node in nodes(model, "ScatterElements", "ScatterND"):
        # These sum too (mixtures of experts), and ONNX Runtime's CPU provider, where results are checked, has them wide only.
        if node.attributes.get_string("reduction", "none") != "none":
            _make_island(node, dtype)
    for node in positions.values():
        _keep_wide(node, dtype, positions)
    for value in graph.inputs:
        if declared[id(value)] == ir.DataType.FLOAT:
            _cast_input(value, graph, dtype)
    for position, value in enumerate(list(graph.outputs)):
        if declared[id(value)] == ir.DataType.FLOAT:
            _cast_output(value, position, graph, dtype)
    return converted


def _position_nodes(model: ir.Model) -> dict[int, ir.Node]:
    """What positions are computed by, by identity: the angles of rotary ones up to sine and cosine, and what becomes an
    integer (the buckets of T5's and MPNet's relative positions).

    They stay in float32, as transformers has them: float16 holds no odd position beyond 2048, and a logarithm rounded to
    it falls into another bucket.
    """
    integers = [node for node in nodes(model, "Cast") if node.attributes.get_int("to", 0) in INTEGERS]
    found: dict[int, ir.Node] = {}
    for end in (*nodes(model, "Sin", "Cos"), *integers):
        behind: dict[int, ir.Node] = {}
        waiting = [end]
        while waiting and len(behind) <= _MOST_POSITION_NODES:
            node = waiting.pop()
            if id(node) in behind:
                continue
            behind[id(node)] = node
            makers = [v.producer() for v in node.inputs if v is not None and v.dtype == ir.DataType.FLOAT]
            waiting += [maker for maker in makers if maker is not None]
        if len(behind) <= _MOST_POSITION_NODES:
            found |= behind
    return found


def _keep_wide(node: ir.Node, dtype: ir.DataType, wide: Mapping[int, ir.Node]) -> None:
    """Casts around one of several nodes that stay in float32 together."""
    graph = node.graph
    assert graph is not None
    for position, value in enumerate(node.inputs):
        if value is not None and value.dtype == dtype:
            cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), value.shape
            graph.insert_before(node, cast)
            node.replace_input_with(position, cast.outputs[0])
    for output in node.outputs:
        outside = [use for use in output.uses() if id(use.node) not in wide]
        if output.dtype == ir.DataType.FLOAT and outside:
            cast = ir.node("Cast", [output], {"to": dtype})
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), output.shape
            graph.insert_after(node, cast)
            for use in outside:
                use.node.replace_input_with(use.idx, cast.outputs[0])


def _cache_buffers(model: ir.Model) -> list[ir.Value]:
    """Graph inputs and outputs that are the KV cache of `GroupQueryAttention`, which writes it in place."""
    found = []
    for node in nodes(model, "GroupQueryAttention", domain=MICROSOFT):
        found += [value for value in node.inputs[3:5] if value is not None and value.is_graph_input()]
        found += [value for value in node.outputs[1:3] if value.is_graph_output()]
    return found


def _narrow(array: np.ndarray, dtype: ir.DataType, name: str | None = None) -> ir.TensorProtocol:
    limit = _LIMITS[dtype]
    return ir.tensor(np.clip(array, -limit, limit).astype(dtype.numpy()), name=name)


def _convert_attributes(node: ir.Node, dtype: ir.DataType) -> None:
    if node.op_type == "Cast" and node.attributes.get_int("to") == ir.DataType.FLOAT:
        node.attributes["to"] = ir.AttrInt64("to", int(dtype))
    for name in ("value", "value_float"):
        attribute = node.attributes.get(name)
        if attribute is None:
            continue
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == ir.DataType.FLOAT:
            node.attributes[name] = ir.AttrTensor(name, _narrow(attribute.as_tensor().numpy(), dtype))
        elif attribute.type == ir.AttributeType.FLOAT and node.op_type == "Constant":
            del node.attributes[name]
            number = np.array(attribute.as_float(), np.float32)
            node.attributes["value"] = ir.AttrTensor("value", _narrow(number, dtype))


def _make_island(node: ir.Node, dtype: ir.DataType) -> None:
    graph = node.graph
    assert graph is not None
    if not any(v is not None and v.dtype == dtype for v in node.inputs):
        return
    for position, value in enumerate(node.inputs):
        if value is not None and value.dtype == dtype:
            cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), value.shape
            graph.insert_before(node, cast)
            node.replace_input_with(position, cast.outputs[0])
    for output in node.outputs:
        if output.dtype == dtype:
            output.type = ir.TensorType(ir.DataType.FLOAT)
            cast = ir.node("Cast", [output], {"to": dtype})
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), output.shape
            graph.insert_after(node, cast)
            for use in list(output.uses()):
                if use.node is not cast:
                    use.node.replace_input_with(use.idx, cast.outputs[0])


def _cast_input(value: ir.Value, graph: ir.Graph, dtype: ir.DataType) -> None:
    cast = ir.node("Cast", [value], {"to": dtype}, name=f"{value.name}.narrow")
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
    for use in list(value.uses()):
        if use.node is not cast:
            use.node.replace_input_with(use.idx, cast.outputs[0])
    graph.insert_before(graph[0], cast)


def _cast_output(value: ir.Value, position: int, graph: ir.Graph, dtype: ir.DataType) -> None:
    if value.dtype != dtype:
        return
    name = value.name
    value.name = f"{name}.narrow"
    cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT}, name=f"{name}.wide")
    cast.outputs[0].name = name
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), value.shape
    graph.append(cast)
    graph.outputs[position] = cast.outputs[0]
