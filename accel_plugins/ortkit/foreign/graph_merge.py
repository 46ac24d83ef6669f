"""Graphs of a decoder merged into one: the graph for the prompt and the graph for later tokens under an `If` on the length of the KV cache.

Optimum writes these two as files, or as one file with an input `use_cache_branch`. Here the length of the cache decides, and weights
that both graphs read are stored once. The keys and values of the attention to an encoder's output are a third graph, which
runs once a prompt.

Functions return changed copies, except `keep_outputs` and `merged`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.errors import IntegrityError

from ..graph.analysis import producer
from ..graph.editing import INLINE_BYTES, add_initializer, constant, content, replace_value

HIDDEN = "encoder_hidden_states"
BRANCH = "use_cache_branch"
_CACHE = re.compile(
    r"(?P<when>past_key_values|past|present_key_values|present)[._](?P<layer>\d+)[._](?:(?P<whose>decoder|encoder)[._])?(?P<kind>key|value)s?\Z"
)
# transformers' exporter gives an input and its output the same name, except where a graph has both.
_LAYERS = re.compile(
    r"(?:(?:input|output)\.)?past_key_values\.(?:(?P<whose>self|cross)_attention_cache\.)?layers\.(?P<layer>\d+)\.(?P<kind>key|value)s\Z"
)
# Operators that keep the first axis: of both operands, of the indices, of the first operand.
_BOTH = frozenset(("Add", "Sub", "Mul", "Div", "Pow"))
_FIRST = frozenset(("MatMul", "Cast", "Identity", "Sqrt", "ReduceMean", "Relu", "LayerNormalization"))
_FIRST |= {"SimplifiedLayerNormalization"}


def our_name(name: str, *, output: bool = False) -> str | None:
    """Our name for a tensor of a cache, by its name in a file; `None` for others.

    `past_key_values.0.decoder.key` is `past_key_values.0.key`; of the encoder's, `past…` is `cross.0.key` and `present…` is
    `new_cross.0.key`.
    """
    match = _CACHE.match(name) or _LAYERS.match(name)
    if match is None:
        return None
    past = match["when"].startswith("past") if match.re is _CACHE else not output
    cross = match["whose"] in ("encoder", "cross")
    prefix = ("cross" if past else "new_cross") if cross else "past_key_values" if past else "present"
    return f"{prefix}.{int(match['layer'])}.{match['kind']}"


def with_our_names(model: ir.Model) -> ir.Model:
    """The same graph with our names for the tensors of its cache."""
    copy = model.clone()
    names = {value: our_name(str(value.name), output=True) for value in copy.graph.outputs}
    names |= {value: our_name(str(value.name)) for value in copy.graph.inputs}
    for value, name in names.items():
        value.name = name or value.name
    return copy


def branches(model: ir.Model, where: Path) -> tuple[ir.Model, ir.Model]:
    """The two graphs in one with `use_cache_branch`: for the prompt, and for later tokens.

    Raises:
        IntegrityError: It has another structure.
    """
    count = len(_branching(model))
    if count != 1:
        raise IntegrityError(
            f"{where} has {count} nodes that read {BRANCH}; the graphs for the prompt and for later tokens are under one node.",
            fix="use decoder_model.onnx and decoder_with_past_model.onnx, or export the model again.",
        )
    return _lifted(model, "else_branch"), _lifted(model, "then_branch")


def _branching(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "If" and [v and v.name for v in node.inputs] == [BRANCH]]


def _lifted(model: ir.Model, branch: str) -> ir.Model:
    """One branch of an `If` as a model, with what it reads from the graph around it."""
    copy = model.clone()
    graph, (node,) = copy.graph, _branching(copy)
    inner = node.attributes[branch].as_graph()
    results, nodes, stored = list(inner.outputs), list(inner), list(inner.initializers.values())
    inner.outputs.clear()
    inner.remove(nodes)
    inner.initializers.clear()
    graph.insert_before(node, nodes)
    for value in stored:
        graph.register_initializer(value)
    for outer, value in zip(node.outputs, results, strict=True):
        replace_value(outer, _made(value, graph, node))
    graph.remove(node, safe=True)
    keep_outputs(copy)
    return copy


def _made(value: ir.Value, graph: ir.Graph, before: ir.Node | None = None) -> ir.Value:
    """The value, or a copy of an input, a constant, or what is an output already: an output has a node and a name of its own."""
    if value.producer() is not None and not value.is_graph_output():
        return value
    node = ir.node("Identity", [value])
    graph.append(node) if before is None else graph.insert_before(before, node)
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    return node.outputs[0]


def keep_outputs(model: ir.Model, keeps: Callable[[str], bool] = bool) -> None:
    """Cut a graph down to what computes some of its outputs: nodes, weights and inputs."""
    graph = model.graph
    kept = [value for value in graph.outputs if keeps(str(value.name))]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    passes.RemoveUnusedNodesPass()(model)
    for value in [one for one in graph.inputs if not one.uses() and not one.is_graph_output()]:
        graph.inputs.remove(value)
        graph.initializers.pop(str(value.name), None)


def cross_attention(prompt: ir.Model, where: Path) -> ir.Model:
    """The part of the prompt's graph, with our names, that makes keys and values of the encoder's output.

    They depend on no value of the decoder's tokens. Where they take the number of rows from the tokens, they take it from the
    encoder's output instead; other shapes are those of one token a row.

    Raises:
        IntegrityError: They depend on more than the encoder's output.
    """
    copy = prompt.clone()
    _take_rows_of_hidden(copy.graph)
    keep_outputs(copy, lambda name: name.startswith("new_cross."))
    graph = copy.graph
    names = _names_read(graph)
    if names != {HIDDEN}:
        raise IntegrityError(
            f"{where} makes the keys and values of the encoder's output from {sorted(names)}, not from {HIDDEN} alone.",
            fix="export the model again: `accel export MODEL OUT`.",
        )
    _fill_other_inputs(graph)
    for value in graph.outputs:
        value.name = str(value.name).removeprefix("new_")
    return copy


def _take_rows_of_hidden(graph: ir.Graph) -> None:
    """Take the number of rows, wherever it is that of a tensor whose first axis is the rows, from the encoder's output."""
    rows = {value for value in graph.inputs if value.name in ("input_ids", "encoder_attention_mask", HIDDEN)}
    hidden = next((value for value in graph.inputs if value.name == HIDDEN), None)
    if hidden is None:
        return
    shape_of_hidden = ir.node("Shape", [hidden])
    graph.insert_before(graph[0], shape_of_hidden)
    for node in graph:
        read = node.inputs[1:2] if node.op_type == "Gather" else node.inputs[: 2 if node.op_type in _BOTH else 1]
        if node.op_type in _BOTH | _FIRST | {"Gather"} and rows & set(read):
            rows.add(node.outputs[0])
        shape = producer(node.inputs[0], "Shape") if node.op_type == "Gather" else None
        if shape is None or shape.attributes or shape.inputs[0] not in rows:
            continue
        index = constant(node.inputs[1])
        if index is not None and index.shape == () and index == 0:
            node.replace_input_with(0, shape_of_hidden.outputs[0])


def _names_read(graph: ir.Graph) -> set[str]:
    """Inputs of which a graph reads more than the shape."""
    needed = set(graph.outputs)
    for node in reversed(graph):
        if node.op_type != "Shape" and not needed.isdisjoint(node.outputs):
            needed.update(_read_by(node))
    return {str(value.name) for value in graph.inputs if value in needed}


def _read_by(node: ir.Node) -> set[ir.Value]:
    """Values that a node and its subgraphs read."""
    read = {value for value in node.inputs if value is not None}
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            inner = attribute.as_graph()
            read.update(inner.outputs, *map(_read_by, inner))
    return read


def _fill_other_inputs(graph: ir.Graph) -> None:
    """Make every input but the encoder's output in the graph: one token a row, and a mask of ones."""
    (hidden,) = (value for value in graph.inputs if value.name == HIDDEN)
    others = [value for value in graph.inputs if value is not hidden]
    tape = ir.tape.Tape()
    shape = tape.op("Shape", [hidden])
    whole = tape.op("Gather", [shape, _integers(graph, 0, 1)], {"axis": 0})
    row = tape.op("Gather", [shape, _integers(graph, 0)], {"axis": 0})
    tokens = tape.op("Concat", [row, _integers(graph, 1)], {"axis": 0})
    for value in others:
        assert value.dtype is not None
        filling = ir.tensor([int(str(value.name).endswith("mask"))], dtype=value.dtype)
        size = whole if value.name == "encoder_attention_mask" else tokens
        value.replace_all_uses_with(tape.op("ConstantOfShape", [size], {"value": filling}))
        graph.inputs.remove(value)
    if others:
        graph.insert_before(graph[0], tape.nodes)


def _integers(graph: ir.Graph, *values: int) -> ir.Value:
    return add_initializer(graph, "integers", np.array(values, np.int64))


def with_cross_inputs(prompt: ir.Model) -> ir.Model:
    """The prompt's graph, with our names, with the keys and values of the encoder's output as inputs."""
    copy = prompt.clone()
    graph = copy.graph
    cross = [value for value in graph.outputs if str(value.name).startswith("new_cross.")]
    kept = [value for value in graph.outputs if value not in cross]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    for value in cross:
        given = ir.Value(name=str(value.name).removeprefix("new_"), type=value.type, shape=value.shape)
        value.replace_all_uses_with(given)
        graph.inputs.append(given)
    keep_outputs(copy)
    return copy


def merged(prompt: ir.Model, following: ir.Model, past: str) -> ir.Model:
    """One graph of two with the same outputs, with our names: `following` where the input `past` holds tokens, else `prompt`.

    Args:
        prompt: Reads no cache. Changed.
        following: Reads one. Changed.
        past: A tensor of the cache `(batch, heads, tokens, size)`.

    Raises:
        IntegrityError: They are for different versions of operators, or return different outputs.
    """
    versions = [model.opset_imports for model in (prompt, following)]
    if any(versions[0].get(domain, version) != version for domain, version in versions[1].items()):
        raise IntegrityError(
            f"The two graphs of the decoder are for different operators: {versions[0]} and {versions[1]}.",
            fix="export both with one version.",
        )
    names = [[str(value.name) for value in model.graph.outputs] for model in (prompt, following)]
    if set(names[0]) != set(names[1]):
        raise IntegrityError(
            f"The two graphs of the decoder return different outputs: only one has {sorted(set(names[0]) ^ set(names[1]))}.",
            fix="copy both from one export.",
        )
    # The prompt's shapes hold for both.
    values = [value for model in (following, prompt) for value in (*model.graph.inputs, *model.graph.outputs)]
    outer = {str(value.name): ir.Value(name=value.name, type=value.type, shape=value.shape) for value in values}
    inputs = dict.fromkeys(str(value.name) for model in (following, prompt) for value in model.graph.inputs)
    graph = ir.Graph(
        [outer[name] for name in inputs], [], nodes=[], name="decoder", opset_imports=versions[0] | versions[1]
    )
    shared: dict[bytes, ir.Value] = {}
    for word, model in (("prompt", prompt), ("following", following)):
        _make_branch(model.graph, word, names[1], outer, graph, shared)
    tape = ir.tape.Tape()
    axis, none = (add_initializer(graph, "tokens", np.array(number, np.int64)) for number in (2, 0))
    tokens = tape.op("Gather", [tape.op("Shape", [outer[past]]), axis], {"axis": 0})
    has_past = tape.op("Greater", [tokens, none])
    attributes = [ir.AttrGraph("then_branch", following.graph), ir.AttrGraph("else_branch", prompt.graph)]
    node = ir.Node("", "If", [has_past], attributes, outputs=[outer[name] for name in names[1]])
    graph.extend([*tape.nodes, node])
    graph.outputs.extend(node.outputs)
    functions = {
        function.identifier(): function for model in (prompt, following) for function in model.functions.values()
    }
    return ir.Model(
        graph,
        ir_version=max(prompt.ir_version, following.ir_version),
        producer_name=following.producer_name,
        producer_version=following.producer_version,
        functions=tuple(functions.values()),
    )


def _make_branch(
    graph: ir.Graph,
    word: str,
    outputs: list[str],
    outer: Mapping[str, ir.Value],
    root: ir.Graph,
    shared: dict[bytes, ir.Value],
) -> None:
    """Make a graph a branch of an `If`: inputs of the graph around it, names of its own, and large weights in `root`, once each."""
    results = {str(value.name): value for value in graph.outputs}
    graph.outputs.clear()
    made = [_made(results[name], graph) for name in outputs]
    for value in graph.inputs:
        value.replace_all_uses_with(outer[str(value.name)])
    graph.inputs.clear()
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes < INLINE_BYTES or tensor.dtype == ir.DataType.STRING:
            continue
        key = hashlib.sha256(f"{tensor.dtype} {tensor.shape}".encode() + content(tensor)).digest()
        if key not in shared:
            shared[key] = ir.Value(
                name=f"shared/{len(shared)}/{name}", type=value.type, shape=value.shape, const_value=tensor
            )
            root.register_initializer(shared[key])
        value.replace_all_uses_with(shared[key])
        del graph.initializers[name]
    graph.outputs.extend(made)
    for inner in (graph, *graph.subgraphs()):
        for value in (*inner.initializers.values(), *(output for node in inner for output in node.outputs)):
            value.name = f"{word}/{value.name}" if value.name else value.name
            if value not in made:
                # Names of axes are those of two graphs.
                value.shape = value.shape if value.is_initializer() else None
