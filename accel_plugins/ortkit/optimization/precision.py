"""Half precision: graphs in float16 or bfloat16, except for what is known, or seen on data, to need float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.artifact import Artifact, Component
from accel.capture import feeds_for
from accel.errors import OptimizeError, QuantizeError
from accel.interfaces.protocols import Feeds

from ..graph.editing import INTEGERS, MICROSOFT, add_initializer, constant, insert_after, nodes
from ..quantization.calibrators import Calibrator, Prompts, prompt_inputs
from .simplifications import infer_shapes

_FLOAT = ir.DataType.FLOAT
_TARGETS: Mapping[str, tuple[ir.DataType, float]] = {
    "float16": (ir.DataType.FLOAT16, 65504.0),
    "bfloat16": (ir.DataType.BFLOAT16, 3.38e38),
}
"""Types and their largest finite numbers. Constants beyond these are cut to them."""
ISLANDS = (
    *("ReduceSum", "ReduceMean", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp", "Pow", "Exp", "Log", "CumSum"),
    *("Softplus", "Range", "Resize"),
)
"""Operators computed in float32: their intermediate values leave float16's range, or lose too many digits in it (ONNX
Runtime's Softplus of float16 is 5e-3 off on a GPU).
"""
_MOST_NODES = 64
# What takes values elsewhere and computes none.
_MOVES = ("Slice", "Gather", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Identity")
# A score that is added to a larger number loses digits that its Softmax would tell apart: float16 moves numbers beyond 8 by 0.004.
_LARGEST_BIAS = 8.0
# Constants beyond this are fills that stand for minus infinity, such as a mask's; the smallest finite value does as well.
_FILL = 1e30
_ALL_ROWS = 1 << 30


def convert(
    artifact: Artifact, component: Component, model: ir.Model, dtype: str, calibration: Iterable[Feeds] | None
) -> dict[str, Any]:
    """Find what must stay float32, by running the graph on the CPU, and convert the rest.

    Args:
        artifact: Where the graph is from.
        component: Its part of it.
        model: The graph in float32; changed in place.
        dtype: `float16` or `bfloat16`.
        calibration: Batches of the first graph's inputs, `(batch, sequence)` for text, to run it on. Random ones of two
            shapes where there are none, or where the graph takes what they do not hold.

    Returns:
        `clamped` constants, `converted` nodes, the names of those `kept`, and on what they were `watched`.

    Raises:
        OptimizeError: The graph does not run on the data.
    """
    clamped = clamp_fills(model, dtype)
    infer_shapes(model)
    given = None if calibration is None else _completed(calibration, component)
    batches = _designed(artifact, component) if given is None else given
    try:
        found = values_out_of_range(model.clone(), component, batches, dtype)
    except QuantizeError as error:
        raise OptimizeError(f"Looking for what must stay float32 failed. {error.message}", fix=error.fix) from error
    watched = "random inputs" if given is None else "calibration data"
    return {"clamped": clamped, **to_half(model, dtype, found), "watched": watched}


def _designed(artifact: Artifact, component: Component) -> list[Feeds]:
    """Random inputs of two shapes; of a graph with a cache, prompts for an empty one."""
    sizes = [(2, 5), (3, min(32, component.max_sizes.get("sequence", 32)))]
    batches: list[Feeds] = []
    for seed, (batch, sequence) in enumerate(sizes):
        axes = {"batch": batch, "sequence": sequence}
        if component.stateful:
            axes |= {"total": sequence, "capacity": sequence, "kept": 1}
        feeds = feeds_for(component.inputs, axes, seed=seed, folder=artifact.path)
        if component.stateful:
            feeds |= prompt_inputs(component, batch, sequence, feeds)
        batches.append(feeds)
    return batches


def _completed(calibration: Iterable[Feeds], component: Component) -> Iterable[Feeds] | None:
    """The data as one graph takes it; `None` when it is another graph's: a decoder's that reads what an encoder said."""
    first = next(iter(calibration), None)
    if first is None:
        raise OptimizeError("The calibration data is empty.", fix="pass at least one batch of inputs.")
    names = {spec.name for spec in component.inputs}
    if names <= set(first):
        return calibration
    if component.stateful and names <= set(first) | set(prompt_inputs(component, 1, 1, {})):
        return Prompts(calibration, component)
    return None


def clamp_fills(model: ir.Model, dtype: str) -> int:
    """Replace huge constants by half of a dtype's largest value, so that a score added to one stays in range; returns
    how many.
    """
    limit, count = _TARGETS[dtype][1] / 2, 0
    for graph in model.graphs():
        for value in list(graph.initializers.values()):
            array = (
                constant(value) if value.dtype == _FLOAT and (value.shape is None or value.shape.rank() == 0) else None
            )
            if array is not None and np.isfinite(array).all() and (np.abs(array) > max(limit, _FILL)).any():
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
        batches: What to run it on, of the shapes that its inputs have.
        dtype: `float16` or `bfloat16`.
    """
    names = [
        str(value.name)
        for node in watched.graph
        for value in node.outputs
        if value.name and value.dtype == _FLOAT and value.uses()
    ]
    with Calibrator(watched, component, names, batches, samples=_ALL_ROWS) as calibrator:
        return calibrator.beyond(_TARGETS[dtype][1])


def to_half(model: ir.Model, dtype: str, out_of_range: frozenset[str]) -> dict[str, Any]:
    """Convert the main graph; inputs and outputs keep their types, except the buffers of a KV cache that attention writes
    in place.

    What stays float32: what makes or reads a value in `out_of_range`, `ISLANDS`, sums that scatter, what positions are
    computed by, what chooses experts, scores that large numbers are added to, what has no half-precision form, and what holds
    a subgraph.

    Returns:
        How many nodes were converted, and the names of those kept.
    """
    infer_shapes(model)
    target = _TARGETS[dtype][0]
    graph = model.graph
    opset = model.opset_imports.get("") or 18
    kept = {id(node) for node in graph if _stays(node, out_of_range, opset, target)}
    kept |= _position_nodes(model) | _biased_scores(model) | _routers(model)
    names = [str(node.name) for node in graph if id(node) in kept and _touches_float(node)]
    is_float = {id(v) for node in graph for v in node.outputs if v.dtype == _FLOAT}
    # Values as the other precision, made once.
    halves: dict[int, ir.Value] = {}
    singles: dict[int, ir.Value] = {}
    converted = {id(v) for node in graph if id(node) not in kept for v in node.outputs if id(v) in is_float}
    for value in _cache_inputs(graph, kept):
        value.type = ir.TensorType(target)
        converted.add(id(value))

    def as_half(value: ir.Value) -> ir.Value:
        if id(value) not in halves:
            array = constant(value)
            if array is not None:
                halves[id(value)] = add_initializer(graph, f"{value.name}.{dtype}", _narrow(array, dtype))
            else:
                halves[id(value)] = _cast(graph, value, target)
        return halves[id(value)]

    def as_single(value: ir.Value) -> ir.Value:
        if id(value) not in singles:
            singles[id(value)] = _cast(graph, value, _FLOAT)
        return singles[id(value)]

    for node in list(graph):
        half = id(node) not in kept
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
    return {"converted": sum(id(node) not in kept and _touches_half(node, target) for node in graph), "kept": names}


def _keep_names(graph: ir.Graph, dtype: str) -> None:
    """Give weights that exist in half precision alone the names of those they come from: layers are called by them."""
    for name, half in list(graph.initializers.items()):
        original = graph.initializers.get(name.removesuffix(f".{dtype}"))
        if original is None or original is half or original.uses() or original.is_graph_output():
            continue
        kept = str(original.name)
        del graph.initializers[kept]
        del graph.initializers[name]
        original.name, half.name = f"{kept}.float32", kept
        graph.initializers[kept] = half


def _stays(node: ir.Node, out_of_range: frozenset[str], opset: int, target: ir.DataType) -> bool:
    if any(value is not None and value.name in out_of_range for value in (*node.inputs, *node.outputs)):
        return True
    if any(attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values()):
        return True
    if node.domain:
        return False
    # Scattering sums too (mixtures of experts), and ONNX Runtime's CPU provider, where results are checked, has it wide only.
    scatters = node.op_type in ("ScatterElements", "ScatterND")
    sums = scatters and node.attributes.get_string("reduction", "none") != "none"
    return sums or node.op_type in ISLANDS or not _has_half_form(node, opset, target)


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


def _position_nodes(model: ir.Model) -> set[int]:
    """What positions are computed by, by identity: the angles of rotary ones up to sine and cosine, and what becomes an
    integer (the buckets of T5's and MPNet's relative positions).

    They stay in float32, as transformers has them: float16 holds no odd position beyond 2048, and a logarithm rounded to
    it falls into another bucket.
    """
    integers = [node for node in nodes(model, "Cast") if node.attributes.get_int("to", 0) in INTEGERS]
    return {found for end in (*nodes(model, "Sin", "Cos"), *integers) for found in _behind(end)}


def _routers(model: ir.Model) -> set[int]:
    """What experts are chosen by, by identity: from the product that scores them up to the choice.

    A token that a rounding sends to another expert has another answer; transformers scores in float32, too.
    """
    return {found for end in nodes(model, "TopK", "ArgMax") for found in _behind(end, ("MatMul", "Gemm"))}


def _behind(end: ir.Node, last: Sequence[str] = ()) -> set[int]:
    """A node and what computes the floats that it reads, by identity, up to the first operators of the types `last`;
    nothing where these are many.
    """
    behind: set[int] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if id(node) in behind:
            continue
        behind.add(id(node))
        if len(behind) > _MOST_NODES:
            return set()
        if node.op_type not in last:
            makers = [v.producer() for v in node.inputs if v is not None and v.dtype == _FLOAT]
            waiting += [maker for maker in makers if maker is not None]
    return behind


def _biased_scores(model: ir.Model) -> set[int]:
    """What adds a table of large numbers to scores, up to their Softmax, by identity: distances between tokens that are
    counted from the end of the text (MPT) are largest where they matter most.
    """
    found: set[int] = set()
    for softmax in nodes(model, "Softmax"):
        chain, value = [softmax], softmax.inputs[0]
        while value is not None and (node := value.producer()) is not None and node.op_type in ("Add", "Where"):
            chain.append(node)
            if node.op_type == "Where":
                value = next((v for v in node.inputs[1:] if v is not None and v.producer() is not None), None)
                continue
            for bias, rest in (node.inputs, tuple(reversed(node.inputs))):
                moved, table = _table_of(bias)
                if table is not None and _is_large(table):
                    found |= {id(kept) for kept in (*chain, *moved)}
                if table is not None:
                    value = rest
                    break
            else:
                break
    return found


def _table_of(value: ir.Value | None) -> tuple[list[ir.Node], np.ndarray | None]:
    """The constant that a value is a part of, if it is one, and what takes the part out of it."""
    moved: list[ir.Node] = []
    while value is not None and constant(value) is None:
        node = value.producer()
        if node is None or node.op_type not in _MOVES:
            return [], None
        moved.append(node)
        value = node.inputs[0]
    return moved, constant(value) if value is not None else None


def _is_large(table: np.ndarray) -> bool:
    finite = np.abs(table[np.abs(table) < _FILL])
    return table.dtype.kind == "f" and bool(finite.size) and float(finite.max()) > _LARGEST_BIAS


def _cache_inputs(graph: ir.Graph, kept: set[int]) -> list[ir.Value]:
    """Graph inputs that are the KV cache of `GroupQueryAttention`, which writes it in place."""
    return [
        value
        for node in graph
        if node.op_type == "GroupQueryAttention" and node.domain == MICROSOFT and id(node) not in kept
        for value in node.inputs[3:5]
        if value is not None and value.is_graph_input() and value.dtype == _FLOAT
    ]


def _touches_float(node: ir.Node) -> bool:
    return any(value is not None and value.dtype == _FLOAT for value in (*node.inputs, *node.outputs))


def _touches_half(node: ir.Node, target: ir.DataType) -> bool:
    return node.op_type != "Cast" and any(value.dtype == target for value in node.outputs)


def _narrow(array: np.ndarray, dtype: str) -> np.ndarray:
    target, limit = _TARGETS[dtype]
    narrowed: np.ndarray = np.clip(array, -limit, limit).astype(target.numpy())
    return narrowed


def _cast(graph: ir.Graph, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    node = ir.node("Cast", [value], {"to": dtype}, name=f"{value.name}.to_{dtype.name.lower()}")
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(dtype), value.shape
    insert_after(value, graph, [node])
    return node.outputs[0]


def _convert_attributes(node: ir.Node, target: ir.DataType, dtype: str) -> None:
    """The attributes that name or hold the element type."""
    if node.op_type == "Cast" and node.attributes.get_int("to", 0) == int(_FLOAT):
        node.attributes["to"] = ir.AttrInt64("to", int(target))
    if node.op_type == "ConstantOfShape" and "value" not in node.attributes:
        # Zeros of float32, where nothing is said.
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_narrow(np.zeros(1, np.float32), dtype)))
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _FLOAT:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(_narrow(attribute.as_tensor().numpy(), dtype)))
        elif attribute.type == ir.AttributeType.FLOAT and node.op_type == "Constant":
            del node.attributes[name]
            number = np.array(attribute.as_float(), np.float32)
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_narrow(number, dtype)))


def _keep_outside(graph: ir.Graph, converted: set[int], as_single: Callable[[ir.Value], ir.Value]) -> None:
    """Graph outputs, and what subgraphs read from here, stay float32; a cache's buffers keep the type that attention writes."""
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
