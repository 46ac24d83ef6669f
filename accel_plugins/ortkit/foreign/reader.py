"""An ONNX folder as an artifact: one graph where it lies, or those of a model that generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from accel.artifact.manifest import Artifact, Component, Manifest, Origin
from accel.errors import TaskError
from accel.interfaces.family_registry import max_text_sizes
from accel.interfaces.folder_reader import Part
from accel.interfaces.task_registry import task_spec

from ..graph.editing import operator_domains
from .decoder_components import adopt_decoders
from .descriptions import describe
from .file_names import descriptions_in, graph_files, graphs_to_fetch, one_graph, several_graphs
from .graph_merge import our_name
from .id_bounds import with_bounds
from .onnx_file import axes_of, fixed_axes, given_inputs, named_specs, precision, read_onnx, stamp


class OnnxFolderReader:
    """See `accel.interfaces.folder_reader.FolderReader`."""

    def choose(
        self, name: str, files: Sequence[str], *, file_name: str | None = None, variant: str | None = None
    ) -> list[str]:
        """The graphs of one variant; see `file_names.graphs_to_fetch`."""
        return graphs_to_fetch(name, files, file_name=file_name, variant=variant)

    def parts(
        self, folder: Path, *, file_name: str | None = None, variant: str | None = None, encoder: bool = False
    ) -> Mapping[Part, str]:
        """See `file_names.several_graphs`."""
        return several_graphs(folder, graph_files(folder), file_name, variant, encoder=encoder)

    def adopt(
        self,
        folder: Path,
        *,
        task: str | None = None,
        subfolder: str = "",
        file_name: str | None = None,
        variant: str | None = None,
    ) -> Artifact:
        """An artifact for the graphs of a folder: where they are, or changed under `ACCEL_HOME`.

        Raises:
            ArtifactNotFoundError: No such graph, or several and none is the usual one; lists the candidates.
            IntegrityError: The file is not ONNX, or one of ours without its manifest.
            TaskError: The graph takes a cache, and the task does not generate.
        """
        if subfolder and descriptions_in(folder / subfolder):
            # Its description names its graphs and settings.
            folder, subfolder = folder / subfolder, ""
        file_name = f"{subfolder}/{file_name}" if subfolder and file_name is not None else file_name
        return _adopted(folder, graph_files(folder, subfolder), file_name, task, variant)


def _adopted(
    folder: Path, candidates: list[str], file_name: str | None, task: str | None, variant: str | None
) -> Artifact:
    description = describe(folder)
    config = description.config
    spec = task_spec(task or description.task(folder))
    if spec.generates:
        return adopt_decoders(folder, candidates, spec, description, file_name=file_name, variant=variant)
    name = one_graph(folder, candidates, file_name or description.files.get("model"), variant)
    file = read_onnx(folder, name)
    graph = file.model.graph
    past = [name for name in file.input_names if our_name(name) is not None]
    if past and not spec.any_graph:
        raise TaskError(
            f"{folder / name} takes the keys and values of earlier tokens ({past[0]}, ...), as graphs that generate do; a model for "
            f"{spec.name} is given none.",
            fix=f"export the original model: `accel export MODEL OUT --task {spec.name}`.",
        )
    pad = config.get("pad_token_id")
    axes: dict[str, str | int] = {**axes_of(graph.inputs), **fixed_axes(config)}
    architecture = str((config.get("architectures") or [""])[0])
    inputs = with_bounds(named_specs(given_inputs(graph), axes, pad if isinstance(pad, int) else 0), graph)
    component = Component(
        name="model",
        file=name,
        files=tuple(stamp(folder, one) for one in file.files),
        inputs=inputs,
        outputs=named_specs(graph.outputs, axes),
        max_sizes=max_text_sizes(config),
        domains=operator_domains(file.model),
    )
    dtype, quantization = precision([file.model])
    manifest = Manifest(
        format="onnx",
        task=spec.name,
        architecture=architecture,
        dtype=dtype,
        opset=file.model.opset_imports.get(""),
        source=Origin(id=str(folder)),
        components=(component,),
        quantization=quantization,
    )
    return Artifact(folder.absolute(), manifest)
