"""Merge of two decoder graphs under an `If` node: one graph for the prompt, one for later tokens.

Optimum writes them as two files, or as one file with an input `use_cache_branch`. In the merged graph, the length of
the KV cache selects the branch, and weights that both graphs read are stored once. The keys and values for
cross-attention are computed by a third graph, which runs once for each prompt.

The functions return changed copies, except `keep_outputs` and `merged`, which change their arguments.
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
# transformers' exporter gives an input and its output the same name; if a graph has both tensors, the exporter adds a
# prefix.
_LAYERS = re.compile(
    r"(?:(?:input|output)\.)?past_key_values\.(?:(?P<whose>self|cross)_attention_cache\.)?layers\.(?P<layer>\d+)\.(?P<kind>key|value)s\Z"
)
# Operators whose output keeps the first axis of both operands (`_BOTH`) or of the first operand (`_FIRST`). `Gather`
# keeps the first axis of its indices.
_BOTH = frozenset(("Add", "Sub", "Mul", "Div", "Pow"))
_FIRST = frozenset(("MatMul", "Cast", "Identity", "Sqrt", "ReduceMean", "Relu", "LayerNormalization"))
_FIRST |= {"SimplifiedLayerNormalization"}


def our_name(name: str, *, output: bool = False) -> str | None:
    """Return accel's name for a cache tensor by its name in a file; `None` for other tensors.

    `past_key_values.0.decoder.key` becomes `past_key_values.0.key`. The names of cross-attention tensors (`encoder`)
    become `cross.0.key` for the past and `new_cross.0.key` for the present.
    """
    match = _CACHE.match(name) or _LAYERS.match(name)
    if match is None:
        return None
    past = match["when"].startswith("past") if match.re is _CACHE else not output
    cross = match["whose"] in ("encoder", "cross")
    prefix = ("cross" if past else "new_cross") if cross else "past_key_values" if past else "present"
    return f"{prefix}.{int(match['layer'])}.{match['kind']}"


def with_our_names(model: ir.Model) -> ir.Model:
    """Return a copy of the graph with accel's names for the cache tensors."""
    copy = model.clone()
    names = {value: our_name(str(value.name), output=True) for value in copy.graph.outputs}
    names |= {value: our_name(str(value.name)) for value in copy.graph.inputs}
    for value, name in names.items():
        value.name = name or value.name
    return copy


def branches(model: ir.Model, where: Path) -> tuple[ir.Model, ir.Model]:
    """Split a graph with `use_cache_branch` into its two branches: the graph for the prompt and the graph for later tokens.

    Raises:
        IntegrityError: The graph does not have exactly one `If` node on `use_cache_branch`.
    """
    count = len(_branching(model))
    if count != 1:
        raise IntegrityError(
            f"{count} If nodes of {where} read the input {BRANCH}; accel needs exactly one If node, with a branch for the prompt "
            "and a branch for later tokens.",
            fix="use decoder_model.onnx and decoder_with_past_model.onnx, or export the model again: `accel export MODEL OUT`.",
        )
    return _lifted(model, "else_branch"), _lifted(model, "then_branch")


def _branching(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "If" and [v and v.name for v in node.inputs] == [BRANCH]]


def _lifted(model: ir.Model, branch: str) -> ir.Model:
    """Return one branch of an `If` node as a model, including the outer nodes and weights that the branch reads."""
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
    """Return a value that can be a graph output: it is the output of a node and not yet a graph output.

    Other values (inputs, constants, graph outputs) are copied with an `Identity` node.
    """
    if value.producer() is not None and not value.is_graph_output():
        return value
    node = ir.node("Identity", [value])
    graph.append(node) if before is None else graph.insert_before(before, node)
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    return node.outputs[0]


def keep_outputs(model: ir.Model, keeps: Callable[[str], bool] = bool) -> None:
    """Remove all outputs for which `keeps(name)` is false, and the nodes, weights and inputs that become unused."""
    graph = model.graph
    kept = [value for value in graph.outputs if keeps(str(value.name))]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    passes.RemoveUnusedNodesPass()(model)
    for value in [one for one in graph.inputs if not one.uses() and not one.is_graph_output()]:
        graph.inputs.remove(value)
        graph.initializers.pop(str(value.name), None)


def cross_attention(prompt: ir.Model, where: Path) -> ir.Model:
    """Return the part of the prompt's graph (with accel's names) that computes cross-attention keys and values.

    These depend only on the encoder's output, not on the decoder's tokens. Where the graph takes the number of rows of
    the batch from the tokens, the result takes it from the encoder's output. Other shapes are those of one token in
    each row.

    Raises:
        IntegrityError: The keys and values depend on more than the encoder's output.
    """
    copy = prompt.clone()
    _take_rows_of_hidden(copy.graph)
    keep_outputs(copy, lambda name: name.startswith("new_cross."))
    graph = copy.graph
    names = _names_read(graph)
    if names != {HIDDEN}:
        raise IntegrityError(
            f"{where} computes the keys and values of cross-attention from {sorted(names)}; accel needs a graph that computes "
            f"them only from {HIDDEN}.",
            fix="export the model again: `accel export MODEL OUT`.",
        )
    _fill_other_inputs(graph)
    for value in graph.outputs:
        value.name = str(value.name).removeprefix("new_")
    return copy


def _take_rows_of_hidden(graph: ir.Graph) -> None:
    """Take the number of rows of the batch from the encoder's output instead of from other tensors with the batch as first axis."""
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
    """Return the names of the inputs whose values (not only shapes) the outputs depend on."""
    needed = set(graph.outputs)
    for node in reversed(graph):
        if node.op_type != "Shape" and not needed.isdisjoint(node.outputs):
            needed.update(_read_by(node))
    return {str(value.name) for value in graph.inputs if value in needed}


def _read_by(node: ir.Node) -> set[ir.Value]:
    """Return the values that a node and its subgraphs read."""
    read = {value for value in node.inputs if value is not None}
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            inner = attribute.as_graph()
            read.update(inner.outputs, *map(_read_by, inner))
    return read


def _fill_other_inputs(graph: ir.Graph) -> None:
    """Replace every input except the encoder's output by constants: one zero token in each row, and a mask of ones."""
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
    """Return the prompt's graph (with accel's names) with cross-attention keys and values as inputs instead of outputs."""
    copy = prompt.clone()
    graph = copy.graph
    cross = [value for value in graph.outputs if str(value.name).startswith("new_cross.")]
    kept = [value for value in graph.outputs if value not in cross]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    for value in cross:
        cross_input = ir.Value(name=str(value.name).removeprefix("new_"), type=value.type, shape=value.shape)
        value.replace_all_uses_with(cross_input)
        graph.inputs.append(cross_input)
    keep_outputs(copy)
    return copy


def merged(prompt: ir.Model, following: ir.Model, past: str) -> ir.Model:
    """Merge two graphs with the same outputs (and accel's names) into one with an `If` node.

    The `If` node runs `following` if the input `past` holds tokens, else `prompt`.

    Args:
        prompt: The graph that reads no cache; changed in place.
        following: The graph that reads a cache; changed in place.
        past: The name of a cache tensor `(batch, heads, tokens, size)`.

    Raises:
        IntegrityError: The graphs use different operator sets, or return different outputs.
    """
    versions = [model.opset_imports for model in (prompt, following)]
    if any(versions[0].get(domain, version) != version for domain, version in versions[1].items()):
        raise IntegrityError(
            f"The decoder graph for prompts and the decoder graph for later tokens use different operator sets (opsets): "
            f"{dict(versions[0])} and {dict(versions[1])}.",
            fix="export both graphs again with the same opset.",
        )
    names = [[str(value.name) for value in model.graph.outputs] for model in (prompt, following)]
    if set(names[0]) != set(names[1]):
        raise IntegrityError(
            f"Only one of the two decoder graphs (for prompts and for later tokens) has the outputs "
            f"{sorted(set(names[0]) ^ set(names[1]))}; both graphs need the same outputs.",
            fix="copy both graphs from the same export.",
        )
    # The prompt's shapes are valid for both graphs: they come last, so they replace those of `following`.
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
    """Turn a graph into a branch of an `If` node.

    The branch reads the inputs of the outer graph, its names get a prefix, and its large weights move to `root`, each
    once.
    """
    results = {str(value.name): value for value in graph.outputs}
    graph.outputs.clear()
    branch_outputs = [_made(results[name], graph) for name in outputs]
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
    graph.outputs.extend(branch_outputs)
    for inner in (graph, *graph.subgraphs()):
        for value in (*inner.initializers.values(), *(output for node in inner for output in node.outputs)):
            value.name = f"{word}/{value.name}" if value.name else value.name
            if value not in branch_outputs:
                # Axis names of the two graphs can conflict, so shapes inside a branch are removed.
                value.shape = value.shape if value.is_initializer() else None
