"""Graphs in `onnx_ir`: how ours name their tensors and axes, and what such a graph takes and gives."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ..artifact.tensors import TensorSpec
from ..interfaces.task_registry import read_config
from ..interfaces.wrapper import Tensors
from .patch_samples import PATCHES
from .samples import pad_id, resize, usual_sizes
from .sound_samples import usual_sounds

if TYPE_CHECKING:
    import onnx_ir

# Python names of a cache's tensors, and what the field calls them.
_LAYERS = re.compile(
    r"(?P<what>past|present|cross)_(?P<layer>\d+)_(?P<kind>key|value|indexer|(?:conv|recurrent)(?:_\d+)?)\Z"
)

# One of a tuple that a model returns for all its layers.
_INNER = re.compile(r"(?P<field>(?:\w+_)?(?:hidden_states|attentions))_(?P<layer>\d+)\Z")


@functools.cache
def graph_name(name: str) -> str:
    """What the graph calls a tensor that the trace calls so: `past_0_key` is `past_key_values.0.key`, `attentions_0` `attentions.0`."""
    if inner := _INNER.match(name):
        return f"{inner['field']}.{inner['layer']}"
    match = _LAYERS.match(name)
    if match is None:
        return name
    what = "past_key_values" if match["what"] == "past" else match["what"]
    return f"{what}.{match['layer']}.{match['kind']}"


def _pair(name: str) -> str | None:
    """A cache tensor's counterpart: the output that becomes an input of the next call, and back."""
    if name.startswith("past_key_values."):
        return "present" + name.removeprefix("past_key_values")
    return "past_key_values" + name.removeprefix("present") if name.startswith("present.") else None


def rename_axes(model: onnx_ir.Model, names: Mapping[str, str]) -> None:
    """Replace symbols in all shapes of a graph and its subgraphs, also inside expressions such as `2*s72`."""
    import onnx_ir

    @functools.cache
    def renamed(text: str) -> str:
        return re.sub(r"[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), text)

    def apply(value: onnx_ir.Value | None) -> None:
        if value is None or value.shape is None:
            return
        dims = [dim if isinstance(dim, int) else renamed(str(dim.value)) if dim.value else None for dim in value.shape]
        value.shape = onnx_ir.Shape(dims)

    for graph in model.graphs():
        for value in (*graph.inputs, *graph.outputs):
            apply(value)
        for node in graph:
            for output in node.outputs:
                apply(output)


def strip_provenance(model: onnx_ir.Model) -> None:
    """Remove the Python stack trace that the trace left on every node: ten times the size of a small graph."""
    model.metadata_props.clear()
    for graph in model.graphs():
        graph.metadata_props.clear()
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()
        for node in graph:
            node.metadata_props.clear()
            for output in node.outputs:
                output.metadata_props.clear()


def drop_unused_inputs(model: onnx_ir.Model) -> tuple[str, ...]:
    """Remove inputs that nothing in the graph reads; return their names."""
    unused = [value for value in model.graph.inputs if not value.uses() and not value.is_graph_output()]
    for value in unused:
        model.graph.inputs.remove(value)
    return tuple(str(value.name) for value in unused)


def graph_specs(values: Sequence[onnx_ir.Value], config: Any = None) -> tuple[TensorSpec, ...]:
    """Inputs or outputs of an `onnx_ir` graph as specs, with roles and pad values of a transformers model's names."""
    specs = []
    for value in values:
        shape: tuple[int | str, ...] = tuple(
            dim if isinstance(dim, int) else str(dim.value or f"{value.name}_{i}")
            for i, dim in enumerate(value.shape or ())
        )
        name = str(value.name)
        pair = _pair(name)
        specs.append(
            TensorSpec(
                name,
                dtype_name(value.dtype),
                shape,
                role="mask" if name.endswith("attention_mask") else "cache" if pair else "data",
                pad_value=pad_id(config) if name == "input_ids" else 0,
                pair=pair,
            )
        )
    return tuple(specs)


def dtype_name(dtype: onnx_ir.DataType | None) -> str:
    """An ONNX element type in torch's words."""
    words = {"FLOAT": "float32", "DOUBLE": "float64"}
    name = dtype.name if dtype is not None else "FLOAT"
    return words.get(name, name.lower())


def usual_sizes_in(folder: Path, specs: Sequence[TensorSpec]) -> dict[str, int]:
    """The sizes of a graph's axes that its model is made for, where it has such: an image's height and width in pixels, and about
    a second of a sound.
    """
    axes = {axis for spec in specs for axis in spec.shape if isinstance(axis, str)}
    config = SimpleNamespace(**read_config(folder))
    return usual_sizes(axes, config, folder) | usual_sounds(axes, config)


def feeds_for(specs: Sequence[TensorSpec], sizes: Mapping[str, int], *, seed: int, folder: Path) -> Tensors:
    """Inputs for a graph that is known by its specs alone: random values, padded masks; axes not in `sizes` get 2, those of
    images the size that the model is made for.
    """
    config = SimpleNamespace(**read_config(folder))
    # Where texts belong to images, each image has as many.
    sizes = {**usual_sizes_in(folder, specs), "texts": 2 * sizes.get("batch", 2), **sizes}
    example = {
        spec.name: torch.zeros([n if isinstance(n, int) else sizes.get(n, 2) for n in spec.shape]).to(
            getattr(torch, spec.dtype)
        )
        for spec in specs
    }
    axes = {spec.name: {i: n for i, n in enumerate(spec.shape) if isinstance(n, str)} for spec in specs}
    feeds = resize(example, axes, sizes, config, seed)
    return {
        name: tensor + torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor.dtype)
        if tensor.is_floating_point() and name != PATCHES
        else tensor
        for name, tensor in feeds.items()
    }
