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
# transformers' exporter gives the past input and the present output of a layer the same name. If a graph has both
# tensors, the exporter adds the prefix `input.` or `output.`.
_LAYERS = re.compile(
    r"(?:(?:input|output)\.)?past_key_values\.(?:(?P<whose>self|cross)_attention_cache\.)?layers\.(?P<layer>\d+)\.(?P<kind>key|value)s\Z"
)
# Operators whose output keeps the first axis of both operands (`_BOTH`) or of the first operand (`_FIRST`). `Gather`
# keeps the first axis of its indices.
_BOTH = frozenset(("Add", "Sub", "Mul", "Div", "Pow"))
_FIRST = frozenset(("MatMul", "Cast", "Identity", "Sqrt", "ReduceMean", "Relu", "LayerNormalization"))
_FIRST |= {"SimplifiedLayerNormalization"}


def our_name(name: str, *, output: bool = False) -> str | None:
    """Return accel's name for a KV cache tensor with this name in a file; `None` for other tensors.

    `past_key_values.0.decoder.key` becomes `past_key_values.0.key`. The names of cross-attention tensors (`encoder`)
    become `cross.0.key` for past inputs and `new_cross.0.key` for present outputs.
    """
    match = _CACHE.match(name) or _LAYERS.match(name)
    if match is None:
        return None
    past = match["when"].startswith("past") if match.re is _CACHE else not output
    cross = match["whose"] in ("encoder", "cross")
    prefix = ("cross" if past else "new_cross") if cross else "past_key_values" if past else "present"
    return f"{prefix}.{int(match['layer'])}.{match['kind']}"


def with_our_names(model: ir.Model) -> ir.Model:
    """Return a copy of the graph in which the KV cache inputs and outputs have accel's names."""
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
    """Return one branch of an `If` node as a model, with the nodes and weights outside of the branch that the branch reads."""
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
        replace_value(outer, _output_value(value, graph, node))
    graph.remove(node, safe=True)
    keep_outputs(copy)
    return copy


def _output_value(value: ir.Value, graph: ir.Graph, before: ir.Node | None = None) -> ir.Value:
    """Return a value that can become a graph output, with the same content.

    A node output that is not yet a graph output is returned unchanged. For other values (inputs, constants, graph
    outputs), an `Identity` node is added and its output is returned.
    """
    if value.producer() is not None and not value.is_graph_output():
        return value
    node = ir.node("Identity", [value])
    graph.append(node) if before is None else graph.insert_before(before, node)
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    return node.outputs[0]


def keep_outputs(model: ir.Model, keeps: Callable[[str], bool] = bool) -> None:
    """Remove every output whose name `keeps` rejects, and the nodes, weights and inputs that become unused."""
    graph = model.graph
    outputs = [value for value in graph.outputs if keeps(str(value.name))]
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    passes.RemoveUnusedNodesPass()(model)
    for value in [
        graph_input for graph_input in graph.inputs if not graph_input.uses() and not graph_input.is_graph_output()
    ]:
        graph.inputs.remove(value)
        graph.initializers.pop(str(value.name), None)


def cross_attention(prompt: ir.Model, where: Path) -> ir.Model:
    """Return the part of the prompt's graph (with accel's names) that computes cross-attention keys and values.

    Keys and values of cross-attention depend on the encoder's output, not on the decoder's tokens. The prompt's graph
    may read the number of rows of the batch from the token ids; the returned graph reads this number from the encoder's
    output. The token ids are replaced by one constant token in each row.

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
    """Change a graph to read the number of rows of the batch only from the encoder's output, not from other tensors."""
    rows = {value for value in graph.inputs if value.name in ("input_ids", "encoder_attention_mask", HIDDEN)}
    hidden = next((value for value in graph.inputs if value.name == HIDDEN), None)
    if hidden is None:
        return
    shape_of_hidden = ir.node("Shape", [hidden])
    graph.insert_before(graph[0], shape_of_hidden)
    for node in graph:
        operands = node.inputs[1:2] if node.op_type == "Gather" else node.inputs[: 2 if node.op_type in _BOTH else 1]
        if node.op_type in _BOTH | _FIRST | {"Gather"} and rows & set(operands):
            rows.add(node.outputs[0])
        shape = producer(node.inputs[0], "Shape") if node.op_type == "Gather" else None
        if shape is None or shape.attributes or shape.inputs[0] not in rows:
            continue
        index = constant(node.inputs[1])
        if index is not None and index.shape == () and index == 0:
            node.replace_input_with(0, shape_of_hidden.outputs[0])


def _names_read(graph: ir.Graph) -> set[str]:
    """Return the names of the inputs whose values change the outputs, without inputs whose shape alone is read."""
    used_values = set(graph.outputs)
    for node in reversed(graph):
        if node.op_type != "Shape" and not used_values.isdisjoint(node.outputs):
            used_values.update(_read_by(node))
    return {str(value.name) for value in graph.inputs if value in used_values}


def _read_by(node: ir.Node) -> set[ir.Value]:
    """Return the values that a node and its subgraphs read."""
    values = {value for value in node.inputs if value is not None}
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            inner = attribute.as_graph()
            values.update(inner.outputs, *map(_read_by, inner))
    return values


def _fill_other_inputs(graph: ir.Graph) -> None:
    """Replace every input except the encoder's output by constants: one zero token in each row, and a mask of ones."""
    (hidden,) = (value for value in graph.inputs if value.name == HIDDEN)
    others = [value for value in graph.inputs if value is not hidden]
    tape = ir.tape.Tape()
    shape = tape.op("Shape", [hidden])
    mask_shape = tape.op("Gather", [shape, _integers(graph, 0, 1)], {"axis": 0})
    row_count = tape.op("Gather", [shape, _integers(graph, 0)], {"axis": 0})
    token_shape = tape.op("Concat", [row_count, _integers(graph, 1)], {"axis": 0})
    for value in others:
        assert value.dtype is not None
        fill_value = ir.tensor([int(str(value.name).endswith("mask"))], dtype=value.dtype)
        shape_of_input = mask_shape if value.name == "encoder_attention_mask" else token_shape
        value.replace_all_uses_with(tape.op("ConstantOfShape", [shape_of_input], {"value": fill_value}))
        graph.inputs.remove(value)
    if others:
        graph.insert_before(graph[0], tape.nodes)


def _integers(graph: ir.Graph, *values: int) -> ir.Value:
    return add_initializer(graph, "integers", np.array(values, np.int64))


def with_cross_inputs(prompt: ir.Model) -> ir.Model:
    """Return a copy of the prompt's graph that reads the cross-attention keys and values as inputs instead of computing them."""
    copy = prompt.clone()
    graph = copy.graph
    cross = [value for value in graph.outputs if str(value.name).startswith("new_cross.")]
    other_outputs = [value for value in graph.outputs if value not in cross]
    graph.outputs.clear()
    graph.outputs.extend(other_outputs)
    for value in cross:
        cross_input = ir.Value(name=str(value.name).removeprefix("new_"), type=value.type, shape=value.shape)
        value.replace_all_uses_with(cross_input)
        graph.inputs.append(cross_input)
    keep_outputs(copy)
    return copy


def merged(prompt: ir.Model, following: ir.Model, condition: str | ir.Value) -> ir.Model:
    """Merge two graphs with the same outputs and with accel's names into one graph with an `If` node.

    The `If` node runs `following` if the cache contains tokens, and `prompt` if it is empty.

    Args:
        prompt: The graph that reads no cache; changed in place.
        following: The graph that reads a cache; changed in place.
        condition: The name of a cache tensor `(batch, heads, tokens, size)`, whose number of tokens is read; or a new boolean input
            `(1)`, which is true if the cache contains tokens.

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
    # The shapes of `prompt` are valid for both graphs. `prompt` comes last, so `outer` keeps the shapes of `prompt`.
    values = [value for model in (following, prompt) for value in (*model.graph.inputs, *model.graph.outputs)]
    outer = {str(value.name): ir.Value(name=value.name, type=value.type, shape=value.shape) for value in values}
    inputs = dict.fromkeys(str(value.name) for model in (following, prompt) for value in model.graph.inputs)
    graph = ir.Graph(
        [outer[name] for name in inputs], [], nodes=[], name="decoder", opset_imports=versions[0] | versions[1]
    )
    shared: dict[bytes, ir.Value] = {}
    for prefix, model in (("prompt", prompt), ("following", following)):
        _make_branch(model.graph, prefix, names[1], outer, graph, shared)
    tape = ir.tape.Tape()
    if isinstance(condition, ir.Value):
        has_past = condition
        graph.inputs.append(condition)
    else:
        axis, zero = (add_initializer(graph, "tokens", np.array(number, np.int64)) for number in (2, 0))
        tokens = tape.op("Gather", [tape.op("Shape", [outer[condition]]), axis], {"axis": 0})
        has_past = tape.op("Greater", [tokens, zero])
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

    The branch reads the inputs of the outer graph, and the names in the branch get a prefix. Large weights move to the
    outer graph `root`; a weight of both branches is stored once.
    """
    results = {str(value.name): value for value in graph.outputs}
    graph.outputs.clear()
    branch_outputs = [_output_value(results[name], graph) for name in outputs]
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
                # The two branches may use one axis name for different sizes, so remove the shapes inside a branch.
                value.shape = value.shape if value.is_initializer() else None
