"""Names of tensors and axes in exported graphs, and the specs of the inputs and outputs of an `onnx_ir` graph."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ..artifact.processor_loading import open_companion
from ..artifact.tensor_specs import TensorSpec
from ..errors import AccelError
from ..interfaces.task_registry import read_config
from ..interfaces.tracing_wrapper import Tensors
from .patch_samples import PATCHES
from .samples import pad_id, resize, usual_sizes
from .sound_samples import usual_sounds

if TYPE_CHECKING:
    import onnx_ir

MODULE = "accel.module"
"""Key of a node's metadata. The value is the name of the module whose weight the node reads, or several names, joined by `+`."""
# Key of the exporter's metadata. The value is the list of the names of the modules that contain an operation.
_SCOPES = "pkg.torch.onnx.name_scopes"
_WEIGHT_OPERATORS = ("MatMul", "Gemm", "Gather")

# Names of KV cache tensors in Python code. `graph_name` converts them to the usual names in ONNX graphs.
_LAYERS = re.compile(
    r"(?P<what>past|present|cross)_(?P<layer>\d+)_(?P<kind>key|value|indexer|(?:conv|recurrent)(?:_\d+)?)\Z"
)

# Name of one hidden state or attention tensor of a tuple with one tensor for each layer.
_INNER = re.compile(r"(?P<field>(?:\w+_)?(?:hidden_states|attentions))_(?P<layer>\d+)\Z")


@functools.cache
def graph_name(name: str) -> str:
    """Return the name of a traced tensor in the graph, such as `past_key_values.0.key` for `past_0_key`."""
    if inner := _INNER.match(name):
        return f"{inner['field']}.{inner['layer']}"
    match = _LAYERS.match(name)
    if match is None:
        return name
    prefix = "past_key_values" if match["what"] == "past" else match["what"]
    return f"{prefix}.{match['layer']}.{match['kind']}"


def _pair(name: str) -> str | None:
    """Return the name of the cache output for a cache input, or of the cache input for a cache output.

    Return `None` for tensors that are not part of the cache.
    """
    if name.startswith("past_key_values."):
        return "present" + name.removeprefix("past_key_values")
    return "past_key_values" + name.removeprefix("present") if name.startswith("present.") else None


def rename_axes(model: onnx_ir.Model, names: Mapping[str, str]) -> None:
    """Rename symbolic axes in all shapes of a graph and its subgraphs. Symbols in expressions such as `2*s72` are also renamed."""
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


def strip_provenance(model: onnx_ir.Model, traced: torch.nn.Module) -> None:
    """Remove the Python stack traces that the exporter stores on every node, because they can be ten times as large as the graph.

    Matrix products and lookups keep the name of their module, as `MODULE`.

    Args:
        model: The graph.
        traced: The module that was traced. If it wraps a transformers model, the names are those of the transformers model.
    """
    from transformers import PreTrainedModel

    wraps = not isinstance(traced, PreTrainedModel) and isinstance(getattr(traced, "model", None), PreTrainedModel)
    prefix = "model." if wraps else ""
    model.metadata_props.clear()
    for graph in model.graphs():
        graph.metadata_props.clear()
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()
        for node in graph:
            scopes = node.metadata_props.get(_SCOPES) if node.op_type in _WEIGHT_OPERATORS else None
            node.metadata_props.clear()
            if scopes is not None:
                # The last entry is the name of the operation in the module.
                names = ast.literal_eval(scopes)[:-1]
                if names and names[-1]:
                    node.metadata_props[MODULE] = names[-1].removeprefix(prefix)
            for output in node.outputs:
                output.metadata_props.clear()


def drop_unused_inputs(model: onnx_ir.Model) -> tuple[str, ...]:
    """Remove the inputs that no node of the graph reads, and return the names of the removed inputs."""
    unused = [value for value in model.graph.inputs if not value.uses() and not value.is_graph_output()]
    for value in unused:
        model.graph.inputs.remove(value)
    return tuple(str(value.name) for value in unused)


def graph_specs(values: Sequence[onnx_ir.Value], config: Any = None) -> tuple[TensorSpec, ...]:
    """Return the specs of inputs or outputs of an `onnx_ir` graph. The role and pad value of an input depend on the input's name."""
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
    """Return the name of a torch dtype for an ONNX element type."""
    words = {"FLOAT": "float32", "DOUBLE": "float64"}
    name = dtype.name if dtype is not None else "FLOAT"
    return words.get(name, name.lower())


def usual_sizes_in(folder: Path, specs: Sequence[TensorSpec]) -> dict[str, int]:
    """Return the usual sizes of the image and audio axes of a model. The dict is empty for a model without such axes.

    The height and width of images are in pixels. The size of an audio axis corresponds to about one second.
    """
    axes = {axis for spec in specs for axis in spec.shape if isinstance(axis, str)}
    config = SimpleNamespace(**read_config(folder))
    return usual_sizes(axes, config, folder) | usual_sounds(axes, config)


def _config_of(folder: Path) -> Any:
    """Return the config of a folder with the defaults of transformers, or only its values if transformers has no class for it."""
    try:
        return open_companion("AutoConfig", folder)
    except AccelError:
        return SimpleNamespace(**read_config(folder))


def feeds_for(specs: Sequence[TensorSpec], sizes: Mapping[str, int], *, seed: int, folder: Path) -> Tensors:
    """Make random inputs for a graph from the specs of its inputs. The masks contain padding.

    Axes that are not in `sizes` have the size 2, but image axes have the usual image size of the model.
    """
    config = _config_of(folder)
    # For models that read images and texts, make two texts for each image.
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
