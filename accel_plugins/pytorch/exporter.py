"""Transformers models as artifacts: their own folder, and a manifest that says what goes in and out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accel.artifact import Artifact, Component, FileRecord, Manifest, Step, TensorSpec, record_files, tool_versions
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
from accel.interfaces.specs import WEIGHTS

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model*", "*.index.json", "accel_quantized.json")


class WeightsExporter:
    """Writes a model as `save_pretrained` does: safetensors, config, generation config. One with quantized layers keeps its integers."""

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Write the weights; see `accel.interfaces.protocols.Exporter`."""
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
    """The artifact of a model whose weights are in `folder`; nothing is written."""
    names = _weight_files(folder)
    file = next((name for name in names if not name.endswith(".json")), names[0])
    # Identified by size and time: there is no checksum to compare with.
    files = tuple(_stamp(folder, name) for name in names)
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
    """The parts of a model, and what goes in and out of each; their files are left to whoever writes them.

    A model of one graph runs twice on inputs of a few tokens, to see what it returns.
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


def _stamp(folder: Path, name: str) -> FileRecord:
    stat = (folder / name).stat()
    return FileRecord(name=name, bytes=stat.st_size, sha256=f"mtime:{stat.st_mtime_ns}")


def _input_specs(part: Source, bounds: Mapping[str, tuple[int, int]]) -> tuple[TensorSpec, ...]:
    """What a part takes; a cache is the session's state, not an input."""
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
    """What a part returns, and which of its axes vary: those that differ between two calls of other sizes."""
    if part.stateful:
        axes = ("batch", "kept" if "logits_to_keep" in part.example else "sequence", "vocabulary")
        return (TensorSpec("logits", part.dtype, axes),)
    names = list(dict.fromkeys(axis for named in part.axes.values() for axis in named.values()))
    runs: list[tuple[dict[str, int], Tensors]] = []
    # Large images take long: Swin2SR has a token for each pixel.
    # Longformer's head for questions counts three separators even in a padded text.
    for first in (2, 5) if set(IMAGE_AXES) <= set(names) else (5, 11):
        sizes = {axis: first + place for place, axis in enumerate(names)}
        sizes |= {axis: AXIS_STEPS[axis] * (first + names.index(axis)) for axis in names if axis in AXIS_STEPS}
        if "texts" in sizes:
            # Where texts belong to images, each image has as many.
            sizes["texts"] = first * sizes["batch"]
        runs.append((sizes, reference(part.model, part.sample(sizes))))
    (sizes, one), (_, other) = runs
    return tuple(
        TensorSpec(
            graph_name(name), _word(tensor), tuple(_axis(name, i, sizes, one, other) for i in range(tensor.ndim))
        )
        for name, tensor in one.items()
    )


def _axis(name: str, position: int, sizes: Mapping[str, int], one: Tensors, other: Tensors) -> int | str:
    size = int(one[name].shape[position])
    if size == other[name].shape[position]:
        return size
    return next((axis for axis, n in sizes.items() if n == size), f"{name}_{position}")


def _word(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
