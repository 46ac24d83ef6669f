"""Exporter of the backend `pytorch`: saves a transformers model and writes a manifest that describes its inputs and
outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accel.artifact import Artifact, Component, Manifest, Step, TensorSpec, record_files, stamp_files, tool_versions
from accel.artifact.gguf_files import GGUF_WEIGHTS
from accel.capture import (
    AXIS_STEPS,
    IMAGE_AXES,
    Source,
    Tensors,
    graph_name,
    pad_id,
    quiet,
    reference,
    save_quantized,
    split,
    unwrapped,
)
from accel.config import ExportConfig
from accel.errors import ExportError
from accel.interfaces.specs import WEIGHTS

_WEIGHTS = (
    "*.safetensors",
    "pytorch_model*.bin",
    "adapter_model*",
    "*.index.json",
    "accel_quantized.json",
    GGUF_WEIGHTS,
)


class WeightsExporter:
    """Exporter that writes a model with `save_pretrained` (safetensors, config, generation config). Quantized layers
    are saved as integers.
    """

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Write the weights and the manifest; see `accel.interfaces.protocols.Exporter`."""
        model: Any = unwrapped(source.model)
        with quiet():
            if source.quantization is None:
                model.save_pretrained(out)
            else:
                save_quantized(model, out)
        described = describe(source, out, config)
        files = record_files(out, _weight_files(out))
        main = next(record.name for record in files if record.name.endswith((".safetensors", ".bin")))
        components = tuple(replace(component, file=main, files=files) for component in described.components)
        return Artifact.create(out, replace(described.manifest, components=components))


def describe(source: Source, folder: Path, config: ExportConfig) -> Artifact:
    """Return an artifact that describes a model whose weights are already in `folder`. This function writes no file."""
    names = _weight_files(folder)
    if not names:
        raise ExportError(
            f"{folder} contains no file of weights with a name that transformers uses, such as model.safetensors.",
            fix="save the weights as model.safetensors in this folder, for example with model.save_pretrained(folder).",
        )
    file = next((name for name in names if not name.endswith(".json")), names[0])
    files = stamp_files(folder, names)
    components = tuple(replace(component, file=file, files=files) for component in components_of(source))
    step = Step(
        stage="export", backend="pytorch", config=config.to_dict(), versions=tool_versions("torch", "transformers")
    )
    manifest = Manifest(
        format=WEIGHTS,
        task=source.task,
        architecture=source.architecture,
        dtype=source.dtype,
        source=source.origin,
        components=components,
        steps=(step,),
    )
    return Artifact(folder.absolute(), manifest)


def components_of(source: Source) -> tuple[Component, ...]:
    """Return the components of a model with their inputs and outputs. The lists of files are empty.

    To find the outputs of a component without a KV cache, the model runs twice on inputs of a few tokens.
    """
    return tuple(
        Component(
            name=part.name,
            file="",
            files=(),
            inputs=_input_specs(part, source.bounds(stateful=part.stateful)),
            outputs=_output_specs(part),
            max_sizes=part.max_sizes,
            unused_inputs=part.unused_inputs,
            own_defaults=part.own_defaults,
            stateful=part.stateful,
            croppable=part.croppable,
            continues=part.continues,
        )
        for part in split(source)
    )


def _weight_files(folder: Path) -> list[str]:
    return sorted({path.name for pattern in _WEIGHTS for path in folder.glob(pattern)})


def _input_specs(part: Source, bounds: Mapping[str, tuple[int, int]]) -> tuple[TensorSpec, ...]:
    """Return the input specs of a component, without the KV cache, which the session stores in its state."""
    return tuple(
        TensorSpec(
            graph_name(name),
            str(tensor.dtype).removeprefix("torch."),
            tuple(part.axes.get(name, {}).get(i, size) for i, size in enumerate(tensor.shape)),
            role="mask" if name.endswith("attention_mask") else "data",
            pad_value=pad_id(part.config) if name == "input_ids" else 0,
            bounds=None if tensor.is_floating_point() else bounds.get(name),
            required=part.required.get(name),
        )
        for name, tensor in part.example.items()
        if not name.startswith("past_")
    )


def _output_specs(part: Source) -> tuple[TensorSpec, ...]:
    """Return the output specs of a component. The component runs twice with different input sizes; an output axis whose
    size differs between the two runs is dynamic.
    """
    if part.stateful:
        axes = ("batch", "kept" if "logits_to_keep" in part.example else "sequence", "vocabulary")
        return (TensorSpec("logits", part.dtype, axes),)
    names = list(dict.fromkeys(axis for named in part.axes.values() for axis in named.values()))
    runs: list[tuple[dict[str, int], Tensors]] = []
    # Each run uses different input sizes. Images have small sizes, because Swin2SR computes one token per pixel. Texts
    # have at least 5 tokens, because Longformer's question answering head needs three separator tokens.
    for start in (2, 5) if set(IMAGE_AXES) <= set(names) else (5, 11):
        sizes = {axis: start + index for index, axis in enumerate(names)}
        sizes |= {axis: AXIS_STEPS[axis] * (start + names.index(axis)) for axis in names if axis in AXIS_STEPS}
        if "texts" in sizes:
            # The model needs the same number of texts for each image.
            sizes["texts"] = start * sizes["batch"]
        runs.append((sizes, reference(part.model, part.sample(sizes))))
    (sizes, first_run), (_, second_run) = runs
    return tuple(
        TensorSpec(
            graph_name(name),
            _dtype_name(tensor),
            tuple(_axis(name, i, sizes, first_run, second_run) for i in range(tensor.ndim)),
        )
        for name, tensor in first_run.items()
    )


def _axis(name: str, position: int, sizes: Mapping[str, int], first_run: Tensors, second_run: Tensors) -> int | str:
    size = int(first_run[name].shape[position])
    if size == second_run[name].shape[position]:
        return size
    return next((axis for axis, n in sizes.items() if n == size), f"{name}_{position}")


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
