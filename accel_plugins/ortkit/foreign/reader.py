"""Reader that turns an ONNX folder into an artifact: a single graph, or the graphs of a generative model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from accel.artifact.checksums import stamp_files
from accel.artifact.manifest import Artifact, Component
from accel.errors import TaskError
from accel.interfaces.family_registry import max_text_sizes
from accel.interfaces.folder_reader import Part
from accel.interfaces.task_registry import task_spec

from ..graph.editing import operator_domains
from .decoder_components import adopt_decoders
from .file_names import descriptions_in, graph_files, graphs_to_fetch, one_graph, several_graphs
from .foreign_manifests import describe
from .graph_merge import our_name
from .id_bounds import with_bounds
from .onnx_file import axes_of, fixed_axes, given_inputs, manifest_of, named_specs, read_onnx


class OnnxFolderReader:
    """Folder reader for ONNX files; implements `accel.interfaces.folder_reader.FolderReader`."""

    def choose(
        self, name: str, files: Sequence[str], *, file_name: str | None = None, variant: str | None = None
    ) -> list[str]:
        """Return the graph files of one variant; see `file_names.graphs_to_fetch`."""
        return graphs_to_fetch(name, files, file_name=file_name, variant=variant)

    def parts(
        self, folder: Path, *, file_name: str | None = None, variant: str | None = None, encoder: bool = False
    ) -> Mapping[Part, str]:
        """Return the graph files of a generative model by part; see `file_names.several_graphs`."""
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
        """Return an artifact for the graphs of a folder; converted graphs are stored under `ACCEL_HOME`.

        Raises:
            ArtifactNotFoundError: The graph does not exist, or the choice is ambiguous; the message lists the
                candidates.
            IntegrityError: The file is not ONNX, or belongs to an artifact of accel whose manifest is missing.
            TaskError: The graph has cache inputs, but the task does not generate.
        """
        if subfolder and descriptions_in(folder / subfolder):
            # The paths in another tool's manifest are relative to the subfolder that contains the manifest.
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
            f"The graph {folder / name} takes the keys and values of earlier tokens ({past[0]}, ...), so it was exported for "
            f"generation; a model for {spec.name} has no such inputs.",
            fix=f"export the original model: `accel export MODEL OUT --task {spec.name}`.",
        )
    pad = config.get("pad_token_id")
    axes: dict[str, str | int] = {**axes_of(graph.inputs), **fixed_axes(config)}
    inputs = with_bounds(named_specs(given_inputs(graph), axes, pad if isinstance(pad, int) else 0), graph)
    component = Component(
        name="model",
        file=name,
        files=stamp_files(folder, file.files),
        inputs=inputs,
        outputs=named_specs(graph.outputs, axes),
        max_sizes=max_text_sizes(config),
        domains=operator_domains(file.model),
    )
    return Artifact(folder.absolute(), manifest_of(spec.name, config, folder, [file.model], (component,)))
