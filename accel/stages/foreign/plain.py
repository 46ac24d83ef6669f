"""An ONNX folder as an artifact: one graph where it lies, or those of a model that generates."""

from __future__ import annotations

from pathlib import Path

from ...artifact.manifest import Artifact, Component, Manifest, Origin
from ...tasks.infer import infer_task, read_config, task_spec
from .decoders import adopt_decoders
from .files import one_graph
from .reading import external_files, max_sizes, named_specs, operator_domains, opset, precision, read_onnx, stamp


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
    """
    config = read_config(folder)
    spec = task_spec(task or infer_task(config, folder))
    if spec.generates:
        return adopt_decoders(folder, spec, config, file_name=file_name, variant=variant)
    name = one_graph(folder, file_name, variant)
    model = read_onnx(folder / name)
    pad = config.get("pad_token_id")
    component = Component(
        name="model",
        file=name,
        files=tuple(stamp(folder, file) for file in (name, *external_files(model, folder, name))),
        inputs=named_specs(
            model.graph.input, pad if isinstance(pad, int) else 0, (tensor.name for tensor in model.graph.initializer)
        ),
        outputs=named_specs(model.graph.output),
        max_sizes=max_sizes(config),
        domains=operator_domains(model),
    )
    dtype, quantization = precision([model])
    manifest = Manifest(
        format="onnx",
        task=spec.name,
        architecture=str((config.get("architectures") or [""])[0]),
        dtype=dtype,
        opset=opset(model),
        source=Origin(id=str(folder)),
        components=(component,),
        quantization=quantization,
    )
    return Artifact(folder.absolute(), manifest)
