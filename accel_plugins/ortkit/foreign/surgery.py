"""Graphs of decoders brought to one: the one that reads a prompt and the one behind it under an `If` on the length of the past.

Optimum wrote these two as files, or as one with an input `use_cache_branch`; ours needs no such input, as the past itself
says which is meant. What both compute with is stored once. The keys and values of the attention to an encoder's output are
a graph of their own, run once a prompt.

Works on names, as the files do: each graph is renamed to its own before it is put beside another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.errors import IntegrityError

from .reading import array_of, graphs_in
from .weights import content, is_large

if TYPE_CHECKING:
    import onnx

HIDDEN = "encoder_hidden_states"
BRANCH = "use_cache_branch"
_CACHE = re.compile(
    r"(?P<when>past_key_values|past|present_key_values|present)[._](?P<layer>\d+)[._](?:(?P<whose>decoder|encoder)[._])?(?P<kind>key|value)s?\Z"
)
# transformers' exporter calls the same before and after a call alike, unless both are there.
_LAYERS = re.compile(
    r"(?:(?:input|output)\.)?past_key_values\.(?:(?P<whose>self|cross)_attention_cache\.)?layers\.(?P<layer>\d+)\.(?P<kind>key|value)s\Z"
)
# Operators that keep the first axis of what they read: of both operands, of the indices, of the first.
_BOTH = frozenset(("Add", "Sub", "Mul", "Div", "Pow"))
_ROW_BY_ROW = _BOTH | frozenset(
    (
        "Gather",
        "MatMul",
        "Cast",
        "Identity",
        "Sqrt",
        "ReduceMean",
        "Relu",
        "LayerNormalization",
        "SimplifiedLayerNormalization",
    )
)


def our_name(name: str, *, output: bool = False) -> str | None:
    """Our name for a tensor of a cache, by its name in a file; `None` for others.

    `past_key_values.0.decoder.key` is `past_key_values.0.key`; of the encoder's, `past…` is `cross.0.key` and `present…` is
    `new_cross.0.key`.
    """
    found = _CACHE.match(name) or _LAYERS.match(name)
    if found is None:
        return None
    past = found["when"].startswith("past") if found.re is _CACHE else not output
    encoders = found["whose"] in ("encoder", "cross")
    prefix = ("cross" if past else "new_cross") if encoders else "past_key_values" if past else "present"
    return f"{prefix}.{int(found['layer'])}.{found['kind']}"


def in_our_words(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with our names for the tensors of its cache."""
    graph = model.graph
    names = {v.name: ours for v in graph.input if (ours := our_name(v.name)) is not None}
    names |= {v.name: ours for v in graph.output if (ours := our_name(v.name, output=True)) is not None}
    made = _copy(model)
    _rename(made.graph, names)
    return made


def branches(model: onnx.ModelProto, where: Path) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The two graphs in one with `use_cache_branch`: for the prompt, and behind a past.

    Raises:
        IntegrityError: It is built otherwise.
    """
    chosen = [node for node in model.graph.node if node.op_type == "If" and list(node.input) == [BRANCH]]
    if len(chosen) != 1:
        raise IntegrityError(
            f"{where} has {len(chosen)} nodes that read {BRANCH}; one graph for the prompt and one behind a past are under one.",
            fix="use decoder_model.onnx and decoder_with_past_model.onnx, or export the model again.",
        )
    node = chosen[0]
    inner = {attribute.name: attribute.g for attribute in node.attribute}
    return _lifted(model, node, inner["else_branch"]), _lifted(model, node, inner["then_branch"])


def _lifted(model: onnx.ModelProto, node: onnx.NodeProto, branch: onnx.GraphProto) -> onnx.ModelProto:
    """One branch of an `If` as a model, with what it reads from the graph around it."""
    made = _copy(model, graph=False)
    made.graph.name = branch.name
    made.graph.node.extend(one for one in model.graph.node if one is not node)
    made.graph.node.extend(branch.node)
    made.graph.initializer.extend([*model.graph.initializer, *branch.initializer])
    made.graph.input.extend(value for value in model.graph.input if value.name != BRANCH)
    outer = dict(zip(node.output, model.graph.output, strict=False))
    names: dict[str, str] = {}
    for value, outside in zip(branch.output, node.output, strict=True):
        output = made.graph.output.add()
        output.CopyFrom(value)
        if outside in outer and value.name != outside:
            # An output may be an input or a constant as it is.
            names[value.name] = outside
    made_names = {name for one in made.graph.node for name in one.output}
    for value in [one for one in made.graph.output if one.name in names]:
        if value.name in made_names:
            continue
        identity = made.graph.node.add(op_type="Identity", input=[value.name], output=[names.pop(value.name)])
        value.name = identity.output[0]
    _rename(made.graph, names)
    return made


def only(model: onnx.ModelProto, outputs: Callable[[str], bool]) -> onnx.ModelProto:
    """The part of a graph that computes some of its outputs: its nodes, weights and inputs."""
    made = _copy(model)
    graph = made.graph
    kept = [value for value in graph.output if outputs(value.name)]
    del graph.output[:]
    graph.output.extend(kept)
    needed = {value.name for value in kept}
    nodes = []
    for node in reversed(graph.node):
        if any(name in needed for name in node.output):
            needed.update(_reads(node))
            nodes.append(node)
    nodes.reverse()
    _keep(graph.node, nodes)
    _keep(graph.initializer, [one for one in graph.initializer if one.name in needed])
    _keep(graph.input, [one for one in graph.input if one.name in needed])
    del graph.value_info[:]
    return made


def cross_attention(prompt: onnx.ModelProto, where: Path) -> onnx.ModelProto:
    """Of the graph that reads a prompt, in our words, what makes keys and values of the encoder's output.

    Of the decoder's own tokens these depend on no value. Where they take the number of rows from them, they take it from the
    encoder's output instead; and where they take anything else of their shape, one token a row stands for them.

    Raises:
        IntegrityError: They depend on more than the encoder's output.
    """
    made = _copy(prompt)
    _rows_of_hidden(made.graph)
    made = only(made, lambda name: name.startswith("new_cross."))
    values = _values_read(made.graph)
    if values != {HIDDEN}:
        raise IntegrityError(
            f"{where} makes the keys and values of the encoder's output from {sorted(values)}, not from {HIDDEN} alone.",
            fix="export the model again: `accel export MODEL OUT`.",
        )
    _stand_in(made.graph)
    names = {value.name: value.name.removeprefix("new_") for value in made.graph.output}
    _rename(made.graph, names)
    return made


def _rows_of_hidden(graph: onnx.GraphProto) -> None:
    """Read the number of rows, wherever it is read from a tensor whose first axis is the rows, from the encoder's output."""
    rows = _with_rows(graph)
    makers = {name: node for node in graph.node for name in node.output}
    zeros = {name for name in _constants(graph) if _constants(graph)[name] == 0}
    for node in graph.node:
        shape = makers.get(node.input[0]) if node.op_type == "Gather" else None
        if shape is None or shape.op_type != "Shape" or node.input[1] not in zeros or shape.attribute:
            continue
        if shape.input[0] in rows:
            node.input[0] = f"{HIDDEN}_shape"
    graph.node.insert(0, make_node("Shape", [HIDDEN], [f"{HIDDEN}_shape"]))


def _with_rows(graph: onnx.GraphProto) -> set[str]:
    """Tensors whose first axis is the rows of a batch, as far as their operators say."""
    rows = {value.name for value in graph.input if value.name in ("input_ids", "encoder_attention_mask", HIDDEN)}
    for node in graph.node:
        first = (
            node.input[1:2] if node.op_type == "Gather" else node.input[:2] if node.op_type in _BOTH else node.input[:1]
        )
        if node.op_type in _ROW_BY_ROW and rows & set(first):
            rows.update(node.output[:1])
    return rows


def _constants(graph: onnx.GraphProto) -> dict[str, int]:
    """Constant whole numbers by name."""
    tensors = {tensor.name: tensor for tensor in graph.initializer if tensor.data_location != tensor.EXTERNAL}
    for node in graph.node:
        if node.op_type == "Constant" and node.output and node.attribute and node.attribute[0].name == "value":
            stored = node.attribute[0].t
            if stored.data_location != stored.EXTERNAL:
                tensors[node.output[0]] = stored
    return {
        name: int(array_of(tensor))
        for name, tensor in tensors.items()
        if not tensor.dims and tensor.data_type == tensor.INT64
    }


def _values_read(graph: onnx.GraphProto) -> set[str]:
    """Inputs of which a graph reads more than the shape."""
    needed = {value.name for value in graph.output}
    for node in reversed(graph.node):
        if node.op_type != "Shape" and any(name in needed for name in node.output):
            needed.update(_reads(node))
    return needed & {value.name for value in graph.input}


def _stand_in(graph: onnx.GraphProto) -> None:
    """Make every input but the encoder's output in the graph: of one token a row, and a mask that hides nothing."""
    from onnx import TensorProto, helper

    others = [value for value in graph.input if value.name != HIDDEN]
    nodes = [
        make_node("Shape", [HIDDEN], ["stand_in_shape"]),
        make_node("Gather", ["stand_in_shape", "stand_in_first"], ["stand_in_rows"], axis=0),
        make_node("Gather", ["stand_in_shape", "stand_in_two"], ["stand_in_both"], axis=0),
        make_node("Concat", ["stand_in_rows", "stand_in_one"], ["stand_in_tokens"], axis=0),
    ]
    for name, values in (("first", [0]), ("two", [0, 1]), ("one", [1])):
        graph.initializer.append(helper.make_tensor(f"stand_in_{name}", TensorProto.INT64, [len(values)], values))
    for value in others:
        size = "stand_in_both" if value.name == "encoder_attention_mask" else "stand_in_tokens"
        one = int(value.name.endswith("mask"))
        filled = helper.make_tensor("value", value.type.tensor_type.elem_type, [1], [one])
        nodes.append(make_node("ConstantOfShape", [size], [value.name], value=filled))
    _keep(graph.input, [value for value in graph.input if value.name == HIDDEN])
    if others:
        _keep(graph.node, [*nodes, *graph.node])


def make_node(kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    """A node of the standard's operators."""
    from onnx import helper

    return helper.make_node(kind, inputs, outputs, **attributes)


def with_cross_inputs(prompt: onnx.ModelProto) -> onnx.ModelProto:
    """The graph that reads a prompt, in our words, with the keys and values of the encoder's output as inputs."""
    made = _copy(prompt)
    graph = made.graph
    for value in [one for one in graph.output if one.name.startswith("new_cross.")]:
        ours = value.name.removeprefix("new_")
        for node in graph.node:
            _rename_node(node, {value.name: ours}, outputs=False)
        given = graph.input.add()
        given.CopyFrom(value)
        given.name = ours
    return only(made, lambda name: not name.startswith("new_cross."))


def joined(
    prompt: onnx.ModelProto, following: onnx.ModelProto, folders: tuple[Path, Path], past: str
) -> onnx.ModelProto:
    """One graph of two with the same outputs, in our words: `following` where the input `past` holds tokens, else `prompt`.

    Args:
        prompt: Reads no past.
        following: Reads one.
        folders: Where each keeps weights beside it.
        past: A tensor of the cache `(batch, heads, tokens, size)`.

    Raises:
        IntegrityError: They are for different operators' versions, or return different things.
    """
    from onnx import TensorProto, helper

    versions = [{item.domain: item.version for item in model.opset_import} for model in (prompt, following)]
    if any(versions[0].get(domain, version) != version for domain, version in versions[1].items()):
        raise IntegrityError(
            f"The two graphs of the decoder are for different operators: {versions[0]} and {versions[1]}.",
            fix="export both with one version.",
        )
    names = [[value.name for value in model.graph.output] for model in (prompt, following)]
    if set(names[0]) != set(names[1]):
        raise IntegrityError(
            f"The two graphs of the decoder return different things: {sorted(set(names[0]) ^ set(names[1]))} of one alone.",
            fix="copy both from one export.",
        )
    made = _copy(following, graph=False)
    for domain, version in versions[0].items():
        if domain not in versions[1]:
            made.opset_import.add(domain=domain, version=version)
    made.ir_version = max(prompt.ir_version, following.ir_version)
    own = {(function.domain, function.name) for function in made.functions}
    made.functions.extend(one for one in prompt.functions if (one.domain, one.name) not in own)
    graph = made.graph
    graph.name = "decoder"
    # What reads a prompt is the freer of the two.
    inputs = {value.name: value for model in (following, prompt) for value in model.graph.input}
    outputs = {value.name: value for value in prompt.graph.output}
    graph.input.extend(inputs.values())
    graph.output.extend(outputs[name] for name in names[1])
    shared: dict[str, tuple[str, Any]] = {}
    inner = [
        _as_branch(model, word, names[1], set(inputs), shared, folder)
        for model, word, folder in zip((prompt, following), ("prompt", "following"), folders, strict=True)
    ]
    graph.initializer.extend(tensor for _, tensor in shared.values())
    graph.initializer.append(helper.make_tensor("token_axis", TensorProto.INT64, [], [2]))
    graph.initializer.append(helper.make_tensor("no_tokens", TensorProto.INT64, [], [0]))
    graph.node.extend(
        [
            make_node("Shape", [past], ["past_shape"]),
            make_node("Gather", ["past_shape", "token_axis"], ["past_tokens"], axis=0),
            make_node("Greater", ["past_tokens", "no_tokens"], ["has_past"]),
            make_node("If", ["has_past"], names[1], then_branch=inner[1], else_branch=inner[0]),
        ]
    )
    return made


def _as_branch(
    model: onnx.ModelProto,
    word: str,
    outputs: Sequence[str],
    inputs: set[str],
    shared: dict[str, tuple[str, Any]],
    folder: Path,
) -> onnx.GraphProto:
    """A model as a branch of an `If`, whose large weights go to `shared` by their content, under names of their own."""
    from onnx import GraphProto, TensorProto

    copy = _copy(model).graph
    made = GraphProto(name=word)
    names = {name: f"{word}/{name}" for graph in graphs_in(copy) for node in graph.node for name in node.output if name}
    for tensor in copy.initializer:
        if not is_large(tensor):
            names[tensor.name] = f"{word}/{tensor.name}"
            made.initializer.add().CopyFrom(tensor)
            continue
        key = content(tensor, folder)
        if key not in shared:
            outer = TensorProto()
            outer.CopyFrom(tensor)
            outer.name = f"shared/{len(shared)}/{tensor.name}"
            shared[key] = (outer.name, outer)
        names[tensor.name] = shared[key][0]
    inner = (one for graph in graphs_in(copy) if graph is not copy for one in graph.initializer)
    names.update({one.name: f"{word}/{one.name}" for one in inner})
    names = {old: new for old, new in names.items() if old not in inputs}
    by_name = {value.name: value for value in copy.output}
    made.node.extend(copy.node)
    for name in outputs:
        made.output.add().CopyFrom(by_name[name])
        if name in inputs or names.get(name, name) == name:
            # An input or a constant as it is.
            made.node.add(op_type="Identity", input=[name], output=[f"{word}/{name}/same"])
            made.output[-1].name = f"{word}/{name}/same"
    _rename(made, names)
    return made


def _copy(model: onnx.ModelProto, *, graph: bool = True) -> onnx.ModelProto:
    from onnx import ModelProto

    made = ModelProto()
    made.CopyFrom(model) if graph else _copy_head(model, made)
    return made


def _copy_head(model: onnx.ModelProto, made: onnx.ModelProto) -> None:
    made.ir_version = model.ir_version
    made.producer_name, made.producer_version = model.producer_name, model.producer_version
    made.opset_import.extend(model.opset_import)
    made.functions.extend(model.functions)


def _keep(field: Any, items: Iterable[Any]) -> None:
    kept = list(items)
    # The items are the field's own: copied before it is emptied.
    copies = [type(item)() for item in kept]
    for copy, item in zip(copies, kept, strict=True):
        copy.CopyFrom(item)
    del field[:]
    field.extend(copies)


def _reads(node: onnx.NodeProto) -> set[str]:
    """Names that a node reads, its inner graphs' included."""
    found = set(node.input)
    for attribute in node.attribute:
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            found.update(value.name for value in inner.output)
            for one in inner.node:
                found |= _reads(one)
    return found


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Other names for values, everywhere in a graph."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        _rename_node(node, names)


def _rename_node(node: onnx.NodeProto, names: Mapping[str, str], *, outputs: bool = True) -> None:
    for field in (node.input, node.output) if outputs else (node.input,):
        for i, name in enumerate(field):
            if name in names:
                field[i] = names[name]
    for attribute in node.attribute:
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            if outputs:
                _rename(inner, names)
            else:
                for one in inner.node:
                    _rename_node(one, names, outputs=False)
                for value in inner.output:
                    value.name = names.get(value.name, value.name)
