"""An ONNX folder as an artifact: one graph where it lies, or those of a model that generates."""

from __future__ import annotations

from pathlib import Path

from ...artifact.end_tokens import with_equal_counts
from ...artifact.manifest import Artifact, Component, Manifest, Origin
from ...errors import TaskError
from ...interfaces.task_registry import task_spec
from .decoders import adopt_decoders
from .descriptions import describe
from .files import one_graph
from .reading import (
    axes_of,
    external_files,
    fixed_axes,
    max_sizes,
    named_specs,
    operator_domains,
    opset,
    precision,
    read_onnx,
    stamp,
)
from .surgery import our_name
from .tables import with_bounds


def adopt_onnx(
    folder: Path, *, file_name: str | None = None, task: str | None = None, variant: str | None = None
) -> Artifact:
    """An artifact for a plain ONNX folder.

    Args:
        folder: The folder.
        file_name: The graph to take, relative to the folder; `model.onnx` or the only one when `None`.
        task: Its task; inferred from `config.json` when `None`.
        variant: The ending of its name.

    Raises:
        ArtifactNotFoundError: No such graph, or several and none is the usual one; lists the candidates.
        IntegrityError: The file is not ONNX, or one of ours without its manifest.
        TaskError: The graph takes a cache, and the task does not generate.
    """
    description = describe(folder)
    config = description.config
    spec = task_spec(task or description.task(folder))
    if spec.generates:
        return adopt_decoders(folder, spec, description, file_name=file_name, variant=variant)
    name = one_graph(folder, file_name or description.files.get("model"), variant)
    model = read_onnx(folder, name)
    past = [value.name for value in model.graph.input if our_name(value.name) is not None]
    if past and spec.name != "custom":
        raise TaskError(
            f"{folder / name} takes the keys and values of earlier tokens ({past[0]}, ...), as graphs that generate do; a model for "
            f"{spec.name} is given none.",
            fix=f"export the original model: `accel export MODEL OUT --task {spec.name}`.",
        )
    pad = config.get("pad_token_id")
    stored = {tensor.name for tensor in model.graph.initializer}
    axes: dict[str, str | int] = {**axes_of(model.graph.input), **fixed_axes(config)}
    architecture = str((config.get("architectures") or [""])[0])
    inputs = with_bounds(named_specs(model.graph.input, axes, pad if isinstance(pad, int) else 0, stored), model.graph)
    component = Component(
        name="model",
        file=name,
        files=tuple(stamp(folder, file) for file in (name, *external_files(model, folder, name))),
        inputs=with_equal_counts(inputs, architecture, folder),
        outputs=named_specs(model.graph.output, axes),
        max_sizes=max_sizes(config),
        domains=operator_domains(model),
    )
    dtype, quantization = precision([model])
    manifest = Manifest(
        format="onnx",
        task=spec.name,
        architecture=architecture,
        dtype=dtype,
        opset=opset(model),
        source=Origin(id=str(folder)),
        components=(component,),
        quantization=quantization,
    )
    return Artifact(folder.absolute(), manifest)
