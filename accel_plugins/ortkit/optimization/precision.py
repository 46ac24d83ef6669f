"""Conversion of graphs to half precision (float16 or bfloat16).

Operators that need float32 are not converted. Some of these operators are listed by type; accel finds others by running
the graph on data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes

from accel.artifact import Artifact, Component
from accel.capture import feeds_for
from accel.errors import OptimizeError, QuantizeError
from accel.interfaces.protocols import Feeds

from ..graph.analysis import dims
from ..graph.editing import INTEGERS, MICROSOFT, NewNodes, add_initializer, constant, insert_after, nodes, scalar
from ..quantization.calibrators import Calibrator, DecoderCalibrationBatches, prompt_inputs, sums_of_axes
from .simplifications import infer_shapes

_FLOAT = ir.DataType.FLOAT
_TARGETS: Mapping[str, tuple[ir.DataType, float]] = {
    "float16": (ir.DataType.FLOAT16, 65504.0),
    "bfloat16": (ir.DataType.BFLOAT16, 3.38e38),
}
"""Half-precision types by name, each with its largest finite number. Larger constants are clamped to this number."""
ISLANDS = (
    *("ReduceSum", "ReduceMean", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp", "Pow", "Exp", "Log", "CumSum"),
    *("Softplus", "Range", "Resize"),
)
"""Operators that are computed in float32, because their intermediate values overflow in float16 or lose too many
digits. For example, ONNX Runtime's float16 Softplus has an error of 5e-3 on a GPU.
"""
_MOST_NODES = 64
# Operators that move or copy values without arithmetic.
_MOVES = ("Slice", "Gather", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Identity")
# The sum of an attention score and a larger number is too inexact for the softmax: float16 rounds numbers above 8 by up
# to 0.004.
_LARGEST_BIAS = 8.0
# Constants with a larger absolute value represent minus infinity, for example in a mask. Half of the lowest number of
# the half-precision type has the same effect.
_FILL = 1e30
_ALL_ROWS = 1 << 30


def convert(
    artifact: Artifact, component: Component, model: ir.Model, dtype: str, calibration: Iterable[Feeds] | None
) -> dict[str, Any]:
    """Find the values that need float32 by running the graph on the CPU, and convert the rest of the graph.

    Args:
        artifact: The artifact that contains the graph.
        component: The graph's component.
        model: The float32 graph; changed in place.
        dtype: `float16` or `bfloat16`.
        calibration: Batches of inputs of the first graph, `(batch, sequence)` for text. Random inputs of two shapes are
            used if this is `None`, or if the graph has inputs that the batches do not contain.

    Returns:
        A report: the number of `clamped` constants and of `converted` nodes, the names of nodes `kept` in float32, and
        the kind of data (`watched`) with which the value ranges were measured.

    Raises:
        OptimizeError: The graph does not run on the data.
    """
    clamped = clamp_fills(model, dtype)
    infer_shapes(model)
    completed = None if calibration is None else _completed(calibration, component)
    batches = _designed(artifact, component) if completed is None else completed
    watched = model.clone()
    values = [value for node in watched.graph for value in node.outputs]
    names = [str(value.name) for value in values if value.name and value.dtype == _FLOAT and value.uses()]
    try:
        with Calibrator(watched, component, names, batches, samples=_ALL_ROWS) as calibrator:
            out_of_range = calibrator.beyond(_TARGETS[dtype][1])
    except QuantizeError as error:
        raise OptimizeError(
            f"The test run that finds the nodes to keep in float32 failed. {error.message}", fix=error.fix
        ) from error
    source = "random inputs" if completed is None else "calibration data"
    return {"clamped": clamped, **to_half(model, dtype, out_of_range), "watched": source}


def _designed(artifact: Artifact, component: Component) -> list[Feeds]:
    """Return random inputs of two shapes; for a graph with a KV cache, prompts with an empty cache."""
    sizes = [(2, 5), (3, min(32, component.max_sizes.get("sequence", 32)))]
    batches: list[Feeds] = []
    for seed, (batch, sequence) in enumerate(sizes):
        axes = {"batch": batch, "sequence": sequence}
        if component.stateful:
            axes |= {"total": sequence, "capacity": sequence, "kept": 1} | dict.fromkeys(
                sums_of_axes(component), sequence
            )
        feeds = feeds_for(component.inputs, axes, seed=seed, folder=artifact.path)
        if component.stateful:
            feeds |= prompt_inputs(component, batch, sequence, feeds)
        batches.append(feeds)
    return batches


def _completed(calibration: Iterable[Feeds], component: Component) -> Iterable[Feeds] | None:
    """Return the calibration data, extended by the KV cache inputs that a graph needs.

    Return `None` if the data belongs to another graph: for example, a decoder also needs the encoder's output.
    """
    first_batch = next(iter(calibration), None)
    if first_batch is None:
        raise OptimizeError("The calibration data is empty.", fix="pass at least one batch of inputs.")
    names = {spec.name for spec in component.inputs}
    if names <= set(first_batch):
        return calibration
    if component.stateful and names <= set(first_batch) | set(prompt_inputs(component, 1, 1, {})):
        return DecoderCalibrationBatches(calibration, component)
    return None


def clamp_fills(model: ir.Model, dtype: str) -> int:
    """Replace huge constants by half of the data type's largest number, so that their sums with scores do not overflow.

    Return the number of replaced constants.
    """
    limit, count = _TARGETS[dtype][1] / 2, 0
    for value in [value for graph in model.graphs() for value in graph.initializers.values()]:
        number = scalar(value) if value.dtype == _FLOAT and not dims(value) else None
        if number is not None and max(limit, _FILL) < abs(number) < math.inf:
            clamped = np.array(math.copysign(limit, number), np.float32)
            value.replace_all_uses_with(add_initializer(model.graph, f"{value.name}.clamped", clamped))
            count += 1
    return count


def to_half(model: ir.Model, dtype: str, out_of_range: frozenset[str]) -> dict[str, Any]:
    """Convert the main graph to half precision.

    Inputs and outputs keep their data types, except the buffers of a KV cache, which attention writes in place. The
    following nodes stay in float32: nodes that read or write a value in `out_of_range`; the operators in `ISLANDS`;
    scatter operators that add; nodes that compute positions; nodes that choose experts; nodes that add large numbers to
    attention scores; operators without a half-precision version; and nodes with a subgraph.

    Args:
        model: The float32 graph; changed in place.
        dtype: `float16` or `bfloat16`.
        out_of_range: The names of values that exceed the range of the data type.

    Returns:
        The number of `converted` nodes, and the names of nodes `kept` in float32.
    """
    infer_shapes(model)
    target = _TARGETS[dtype][0]
    graph = model.graph
    opset = model.opset_imports.get("") or 18
    float32_nodes = {id(node) for node in graph if _stays(node, out_of_range, opset, target)}
    float32_nodes |= _position_nodes(model) | _biased_scores(model) | _routers(model)
    float32_names = [
        str(node.name)
        for node in graph
        if id(node) in float32_nodes and any(v is not None and v.dtype == _FLOAT for v in (*node.inputs, *node.outputs))
    ]
    # Remember the cast of each value, so that each value is cast to half precision or to float32 at most once.
    halves: dict[int, ir.Value] = {}
    singles: dict[int, ir.Value] = {}
    converted = {id(v) for node in graph if id(node) not in float32_nodes for v in node.outputs if v.dtype == _FLOAT}
    for value in _cache_inputs(graph, float32_nodes):
        value.type = ir.TensorType(target)
        converted.add(id(value))

    def as_half(value: ir.Value) -> ir.Value:
        if id(value) not in halves:
            array, name = constant(value), f"{value.name}.{dtype}"
            half = (
                add_initializer(graph, name, _narrow(array, dtype))
                if array is not None
                else _cast(graph, value, target)
            )
            halves[id(value)] = half
        return halves[id(value)]

    def as_single(value: ir.Value) -> ir.Value:
        if id(value) not in singles:
            singles[id(value)] = _cast(graph, value, _FLOAT)
        return singles[id(value)]

    for node in list(graph):
        half = id(node) not in float32_nodes
        for index, value in enumerate(node.inputs):
            if value is None or (value.dtype != _FLOAT and id(value) not in converted):
                continue
            if half and id(value) not in converted:
                node.replace_input_with(index, as_half(value))
            elif not half and id(value) in converted:
                node.replace_input_with(index, as_single(value))
        if half:
            _convert_attributes(node, target, dtype)
            for value in node.outputs:
                if id(value) in converted:
                    value.type = ir.TensorType(target)
    _keep_outside(graph, converted, as_single)
    _keep_names(graph, dtype)
    passes.RemoveUnusedNodesPass()(model)
    halved = [
        n
        for n in graph
        if id(n) not in float32_nodes and n.op_type != "Cast" and target in [v.dtype for v in n.outputs]
    ]
    return {"converted": len(halved), "kept": float32_names}


def _keep_names(graph: ir.Graph, dtype: str) -> None:
    """Rename half-precision weights to the names of their float32 originals if the originals are not used anymore.

    Later stages find layers by the names of their weights.
    """
    for name, half in list(graph.initializers.items()):
        original = graph.initializers.get(name.removesuffix(f".{dtype}"))
        if original is None or original is half or original.uses() or original.is_graph_output():
            continue
        original_name = str(original.name)
        ir.convenience.rename_values([original, half], [f"{original_name}.float32", original_name])
        del graph.initializers[f"{original_name}.float32"]


def _stays(node: ir.Node, out_of_range: frozenset[str], opset: int, target: ir.DataType) -> bool:
    if any(value is not None and value.name in out_of_range for value in (*node.inputs, *node.outputs)):
        return True
    if any(attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values()):
        return True
    if node.domain:
        return False
    # Scatter operators that add (in mixtures of experts) stay in float32, because ONNX Runtime's CPU provider supports
    # them only in float32. accel checks the results of graphs with this provider.
    scatters = node.op_type in ("ScatterElements", "ScatterND")
    sums = scatters and node.attributes.get_string("reduction", "none") != "none"
    return sums or node.op_type in ISLANDS or not _has_half_form(node, opset, target)


def _has_half_form(node: ir.Node, opset: int, target: ir.DataType) -> bool:
    """Return whether the operator supports the half-precision type for all float inputs and outputs of this node."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return True
    half_type = f"tensor({target.name.lower()})"
    for values, formal in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, value in enumerate(values):
            is_float = value is not None and value.dtype == _FLOAT
            if is_float and formal and half_type not in formal[min(index, len(formal) - 1)].types:
                return False
    return True


def _position_nodes(model: ir.Model) -> set[int]:
    """Return the ids of nodes that compute positions.

    The nodes compute the angles of rotary position embeddings up to sine and cosine, or floats that are cast to
    integers (the buckets of relative positions in T5 and MPNet). The nodes stay in float32, as in transformers: float16
    cannot represent odd positions above 2048, and a logarithm rounded to float16 may give another bucket.
    """
    integers = [node for node in nodes(model, "Cast") if node.attributes.get_int("to", 0) in INTEGERS]
    return {node for end in (*nodes(model, "Sin", "Cos"), *integers) for node in _producers(end)}


def _routers(model: ir.Model) -> set[int]:
    """Return the ids of nodes that select experts: from the product that scores the experts to the selection.

    The nodes stay in float32, as in transformers: if rounding changes the selected expert of a token, the result of the
    token is different.
    """
    return {node for end in nodes(model, "TopK", "ArgMax") for node in _producers(end, ("MatMul", "Gemm"))}


def _producers(end: ir.Node, last: Sequence[str] = ()) -> set[int]:
    """Return the ids of a node and of the nodes that compute its float inputs, back to the first operators of types `last`.

    Return an empty set if there are more than `_MOST_NODES` such nodes.
    """
    producers: set[int] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if id(node) in producers:
            continue
        producers.add(id(node))
        if len(producers) > _MOST_NODES:
            return set()
        if node.op_type not in last:
            makers = [v.producer() for v in node.inputs if v is not None and v.dtype == _FLOAT]
            waiting += [maker for maker in makers if maker is not None]
    return producers


def _biased_scores(model: ir.Model) -> set[int]:
    """Return the ids of nodes that add a table of large numbers to attention scores, up to the softmax.

    An example is MPT. Its table contains distances from the end of the text, and the largest numbers have the largest
    effect.
    """
    biased: set[int] = set()
    for softmax in nodes(model, "Softmax"):
        chain, value = [softmax], softmax.inputs[0]
        while value is not None and (node := value.producer()) is not None and node.op_type in ("Add", "Where"):
            chain.append(node)
            if node.op_type == "Where":
                value = next((v for v in node.inputs[1:] if v is not None and v.producer() is not None), None)
                continue
            for bias, other_term in (node.inputs, tuple(reversed(node.inputs))):
                selecting_nodes, table = _table_of(bias)
                if table is not None and _is_large(table):
                    biased |= {id(selected) for selected in (*chain, *selecting_nodes)}
                if table is not None:
                    value = other_term
                    break
            else:
                break
    return biased


def _table_of(value: ir.Value | None) -> tuple[list[ir.Node], np.ndarray | None]:
    """Return the nodes that select a value from a constant table, and the table; `([], None)` if there is no table."""
    selecting_nodes: list[ir.Node] = []
    while value is not None and constant(value) is None:
        node = value.producer()
        if node is None or node.op_type not in _MOVES:
            return [], None
        selecting_nodes.append(node)
        value = node.inputs[0]
    return selecting_nodes, constant(value) if value is not None else None


def _is_large(table: np.ndarray) -> bool:
    finite = np.abs(table[np.abs(table) < _FILL])
    return table.dtype.kind == "f" and bool(finite.size) and float(finite.max()) > _LARGEST_BIAS


def _cache_inputs(graph: ir.Graph, float_nodes: set[int]) -> list[ir.Value]:
    """Return the graph inputs that are the KV cache of `GroupQueryAttention`, which writes the cache in place."""
    return [
        value
        for node in graph
        if node.op_type == "GroupQueryAttention" and node.domain == MICROSOFT and id(node) not in float_nodes
        for value in node.inputs[3:5]
        if value is not None and value.is_graph_input() and value.dtype == _FLOAT
    ]


def _narrow(array: np.ndarray, dtype: str) -> np.ndarray:
    target, limit = _TARGETS[dtype]
    clipped = np.asarray(np.clip(array, -limit, limit))
    if dtype == "float16":
        # torch rounds as NumPy does, and takes a tenth of the time.
        return torch.from_numpy(clipped).half().numpy()
    return clipped.astype(target.numpy())


def _cast(graph: ir.Graph, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    new = NewNodes(graph, str(value.name))
    cast = new.op("Cast", value, to=dtype, like=value, dtype=dtype, name=f"{value.name}.to_{dtype.name.lower()}")
    insert_after(value, graph, new.nodes)
    return cast


def _convert_attributes(node: ir.Node, target: ir.DataType, dtype: str) -> None:
    """Convert the attributes of a node that contain the float type or float tensors."""
    if node.op_type == "Cast" and node.attributes.get_int("to", 0) == int(_FLOAT):
        node.attributes["to"] = ir.AttrInt64("to", int(target))
    if node.op_type == "MatMulNBits":
        # With float16 inputs and 8-bit accumulation, ONNX Runtime's CPU kernel differs by 62 % of the largest logit of a BART with 4-bit
        # weights, instead of 19 % (onnxruntime 1.30 and 1.31.1).
        node.attributes.pop("accuracy_level", None)
    if node.op_type == "ConstantOfShape" and "value" not in node.attributes:
        # Without the attribute `value`, `ConstantOfShape` would return float32 zeros.
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_narrow(np.zeros(1, np.float32), dtype)))
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _FLOAT:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(_narrow(attribute.as_tensor().numpy(), dtype)))
        elif attribute.type == ir.AttributeType.FLOAT and node.op_type == "Constant":
            del node.attributes[name]
            number = np.array(attribute.as_float(), np.float32)
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_narrow(number, dtype)))


def _keep_outside(graph: ir.Graph, converted: set[int], as_single: Callable[[ir.Value], ir.Value]) -> None:
    """Cast graph outputs, and values that subgraphs read, back to float32, except outputs of the KV cache."""
    for index, value in enumerate(list(graph.outputs)):
        producer = value.producer()
        if id(value) not in converted or producer is None or _is_cache(value, producer):
            continue
        name, single = value.name, as_single(value)
        graph.outputs[index] = single
        value.name, single.name = f"{name}.half", name
    for node in list(graph):
        for value in node.outputs:
            if id(value) in converted:
                for use in list(value.uses()):
                    if use.node.graph is not graph:
                        use.node.replace_input_with(use.idx, as_single(value))


def _is_cache(value: ir.Value, producer: ir.Node) -> bool:
    attention = producer.op_type == "GroupQueryAttention" and producer.domain == MICROSOFT
    return attention and any(value is output for output in producer.outputs[1:3])
