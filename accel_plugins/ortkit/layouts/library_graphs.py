"""Graphs with the file names, inputs and outputs of Optimum and transformers.js, made from the graphs of an artifact.

Decoders of accel compute the logits of chosen tokens (`logits_to_keep`), and read cross-attention keys and values that a separate graph
computes. The libraries know neither. A decoder with an encoder becomes `decoder_model_merged`: a graph with an `If` node on
`use_cache_branch`, whose branch for the prompt also computes the cross-attention keys and values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from accel.artifact import Artifact
from accel.artifact.manifest import Component
from accel.errors import TaskError

from ..foreign import graph_merge
from ..graph.editing import NewNodes, read_graph

_CACHE = re.compile(r"(past_key_values|present|cross)\.(\d+)\.(key|value)\Z")
_AXES = {"batch": "batch_size", "sequence": "sequence_length", "total": "total_sequence_length"}
"""Axis names of the libraries. transformers.js reads `batch_size` to make the empty KV cache; unknown axes of the cache get size 0."""
_ENCODER_DECODER = {"encoder", "cross_attention", "decoder"}


def check_components(artifact: Artifact, layout: str) -> None:
    """Raise if the libraries have no file names for the graphs of an artifact.

    Raises:
        TaskError: The model has other parts than a single graph or an encoder and a decoder, or a state that is not a KV cache.
    """
    names = {component.name for component in artifact.components}
    states = [spec.name for c in artifact.components for spec in c.inputs if spec.pair and not _CACHE.match(spec.name)]
    if names not in ({"model"}, _ENCODER_DECODER) or states:
        problem = f"the state {states[0]!r}" if states else f"the graphs {', '.join(sorted(names))}"
        raise TaskError(
            f"The layout {layout!r} has no names for {problem} of this model ({artifact.manifest.architecture}).",
            fix="use the artifact of `accel export` with accel, or convert a model that is a single graph or an encoder and a decoder.",
        )


def library_graphs(artifact: Artifact, *, logits: bool) -> dict[str, ir.Model]:
    """Return the graphs of an artifact by file name without suffix: `model`, or `encoder_model` and `decoder_model_merged`.

    Args:
        artifact: An artifact that `check_components` accepts.
        logits: Whether a decoder without an encoder has the input `num_logits_to_keep` of transformers.js: the number of last tokens
            whose logits are computed, 0 for all. Otherwise it always computes the logits of all tokens.
    """
    models = {component.name: read_graph(artifact.path / component.file) for component in artifact.components}
    if "decoder" in models:
        decoder = artifact.component("decoder")
        merged = _merged_decoder(models["cross_attention"], models["decoder"], decoder)
        graphs = {"encoder_model": models["encoder"], "decoder_model_merged": merged}
    else:
        graphs = {"model": models["model"]}
        _keep_last_logits(models["model"].graph, named=logits)
    for model in graphs.values():
        _rename_axes(model.graph)
    return graphs


def _keep_last_logits(graph: ir.Graph, *, named: bool) -> None:
    """Replace the input `logits_to_keep` (token indices) by `num_logits_to_keep` (a number), or by the indices of all tokens."""
    inputs = {str(value.name): value for value in graph.inputs}
    indices = inputs.get("logits_to_keep")
    if indices is None:
        return
    new = NewNodes(graph, "logits_to_keep")
    count = new.op("Squeeze", new.op("Shape", inputs["input_ids"], start=1, end=2), dtype=ir.DataType.INT64, shape=[])
    first = zero = new.constant(0)
    if named:
        number = ir.Value(name="num_logits_to_keep", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
        last = new.op("Max", new.op("Sub", count, number), zero)
        first = new.op("Where", new.op("Greater", number, zero), last, zero)
        graph.inputs.append(number)
    every = new.op("Range", first, count, new.constant(1), dtype=ir.DataType.INT64, shape=["kept"])
    graph.insert_before(graph[0], new.nodes)
    indices.replace_all_uses_with(every)
    graph.inputs.remove(indices)


def _merged_decoder(cross: ir.Model, decoder: ir.Model, component: Component) -> ir.Model:
    """Return the decoder as one graph with the input `use_cache_branch`. Weights of both branches are stored once."""
    _make_mask_and_positions(decoder.graph)
    following, prompt = decoder, _prompt(cross, decoder.clone())
    constants = {spec.name: spec for spec in component.inputs if spec.name.startswith("cross.")}
    for name, spec in constants.items():
        # The libraries keep the keys and values of the first call, so later calls return empty tensors, as in Optimum's graphs.
        (value,) = (value for value in following.graph.inputs if value.name == name)
        new = NewNodes(following.graph, name)
        sizes = [0, *(size if isinstance(size, int) else 1 for size in spec.shape[1:])]
        assert value.dtype is not None
        empty = new.op("Identity", new.constant(np.zeros(sizes), value.dtype.numpy()), like=value)
        empty.name = f"new_{name}"
        following.graph.extend(new.nodes)
        following.graph.outputs.append(empty)
    branch = ir.Value(name=graph_merge.BRANCH, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    model = graph_merge.merged(prompt, following, branch)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = _library_name(str(value.name))
    return model


def _make_mask_and_positions(graph: ir.Graph) -> None:
    """Compute the decoder's mask and positions in the graph: no token of the decoder is padding.

    transformers.js would pass the mask of the encoder as `attention_mask`.
    """
    inputs = {str(value.name): value for value in graph.inputs}
    tokens, past = inputs["input_ids"], inputs["past_key_values.0.key"]
    new = NewNodes(graph, "decoder_tokens")
    rows, count = (new.op("Shape", tokens, start=axis, end=axis + 1) for axis in (0, 1))
    past_count = new.op("Shape", past, start=2, end=3)
    total = new.op("Add", past_count, count)
    replaced = {}
    if "attention_mask" in inputs:
        mask = inputs["attention_mask"]
        assert mask.dtype is not None
        ones = ir.tensor(np.ones(1, mask.dtype.numpy()))
        replaced[mask] = new.op("ConstantOfShape", new.op("Concat", rows, total, axis=0), like=mask, value=ones)
    if "position_ids" in inputs:
        positions = inputs["position_ids"]
        scalars = [new.op("Squeeze", size) for size in (past_count, total)]
        row = new.op("Range", *scalars, new.constant(1))
        shape = new.op("Concat", rows, new.constant([1]), axis=0)
        replaced[positions] = new.op("Expand", new.op("Unsqueeze", row, new.constant([0])), shape, like=positions)
    graph.insert_before(graph[0], new.nodes)
    for value, computed in replaced.items():
        value.replace_all_uses_with(computed)
        graph.inputs.remove(value)


def _prompt(cross: ir.Model, decoder: ir.Model) -> ir.Model:
    """Return the decoder for the prompt: it computes the cross-attention keys and values and ignores the KV cache."""
    graph = decoder.graph
    new = NewNodes(graph, "empty_cache")
    for value in list(graph.inputs):
        if str(value.name).startswith("past_key_values."):
            # Optimum passes a KV cache of one token that must not be read.
            zero, two = new.constant([0]), new.constant([2])
            empty = new.op("Slice", value, zero, zero, two, like=value)
            value.replace_all_uses_with(empty)
            new.nodes[-1].replace_input_with(0, value)
    graph.insert_before(graph[0], new.nodes)
    results = {str(value.name): value for value in cross.graph.outputs}
    body, weights = list(cross.graph), list(cross.graph.initializers.values())
    hidden = next(value for value in cross.graph.inputs if value.name == graph_merge.HIDDEN)
    cross.graph.outputs.clear()
    cross.graph.remove(body)
    cross.graph.inputs.clear()
    cross.graph.initializers.clear()
    for value in (*weights, *(output for node in body for output in node.outputs)):
        value.name = f"cross_attention/{value.name}"
    for value in weights:
        graph.register_initializer(value)
    graph.insert_before(graph[0], body)
    if not any(value.name == graph_merge.HIDDEN for value in graph.inputs):
        graph.inputs.append(hidden)
    else:
        hidden.replace_all_uses_with(next(value for value in graph.inputs if value.name == graph_merge.HIDDEN))
    for value in [value for value in graph.inputs if str(value.name) in results]:
        name = str(value.name)
        value.replace_all_uses_with(results[name])
        graph.inputs.remove(value)
        results[name].name = f"new_{name}"
        graph.outputs.append(results[name])
    decoder.opset_imports.update({d: v for d, v in cross.opset_imports.items() if d not in decoder.opset_imports})
    return decoder


def _library_name(name: str) -> str:
    """Return the libraries' name of an input or output of a decoder with an encoder."""
    match = _CACHE.match(name.removeprefix("new_"))
    if match is None:
        return name
    whose = "encoder" if match[1] == "cross" else "decoder"
    when = match[1] if match[1] != "cross" else "present" if name.startswith("new_") else "past_key_values"
    return f"{when}.{match[2]}.{whose}.{match[3]}"


def _rename_axes(graph: ir.Graph) -> None:
    for value in (*graph.inputs, *graph.outputs):
        axes: Mapping[str, str] = _AXES
        if _CACHE.match(str(value.name)) or ".decoder." in str(value.name):
            past = str(value.name).startswith("past")
            axes = {**_AXES, "capacity": "past_sequence_length" if past else "total_sequence_length"}
        sizes = [dim if isinstance(dim, int) else axes.get(str(dim.value), dim.value) for dim in value.shape or ()]
        if value.shape is not None:
            value.shape = ir.Shape(sizes)
