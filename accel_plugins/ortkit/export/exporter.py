"""PyTorch model to ONNX artifact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel.artifact import MANIFEST, MARK, Artifact, Component, Manifest, Step, record_files, tool_versions, with_files
from accel.capture import Source, capture_onnx, drop_unused_inputs, graph_specs, quiet, split
from accel.config import ExportConfig
from accel.errors import ConfigError, ExportError

from ..graph.editing import merge_initializers, operator_domains, read_graph, save_graphs, write_graph
from .decoders import OrtAttention
from .quantized import lower_quantized_layers
from .recurrence import expand_recurrences
from .writing import release_when_written

if TYPE_CHECKING:
    import onnx_ir

GRAPH = "model.onnx"
_INLINE_LIMIT_BYTES = 1 << 30


class OnnxExporter:
    """Writes `model.onnx` with its weights in `model.onnx.data`, and transformers' own manifest beside ours."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Trace, convert and write; see `accel.interfaces.protocols.Exporter`."""
        parts = split(source, OrtAttention())
        if parts == (source,):
            components, opset = self._single(source, config, out)
        else:
            components, opset = self._parts(parts, config, out)
        step = Step(
            stage="export",
            backend=self._backend,
            config=config.to_dict(),
            versions=tool_versions("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime"),
        )
        manifest = Manifest(
            format="onnx",
            task=task,
            architecture=source.architecture,
            dtype=source.dtype,
            opset=opset,
            source=source.origin,
            components=components,
            steps=(step,),
        )
        return Artifact.create(out, manifest)

    def _single(self, source: Source, config: ExportConfig, out: Path) -> tuple[tuple[Component, ...], int | None]:
        """One graph, as transformers' exporter writes it."""
        model, exported = capture_onnx(source, config)
        expand_recurrences(model)
        lower_quantized_layers(model)
        merge_initializers(model)
        unused = drop_unused_inputs(model)
        component = _component(source, model, GRAPH, unused)
        model.metadata_props[MARK] = MANIFEST
        release_when_written(model)
        with quiet():
            exported.save_pretrained(out)
            if config.external_data:
                write_graph(read_graph(out / GRAPH), out / GRAPH)
            else:
                self._inline(model, out)
        files = [name for name in (GRAPH, f"{GRAPH}.data") if (out / name).exists()]
        return (replace(component, files=record_files(out, files)),), model.opset_imports.get("")

    def _parts(
        self, parts: tuple[Source, ...], config: ExportConfig, out: Path
    ) -> tuple[tuple[Component, ...], int | None]:
        """The graphs of a generating model, over one file of weights."""
        if not config.external_data:
            raise ConfigError(
                "Graphs that share weights keep them in a file of their own.", fix="leave external_data=False out."
            )
        models, components = {}, []
        for part in parts:
            model, _ = capture_onnx(part, config)
            expand_recurrences(model)
            lower_quantized_layers(model)
            merge_initializers(model)
            file = f"{part.name}.onnx"
            models[file] = model
            components.append(_component(part, model, file, drop_unused_inputs(model)))
            release_when_written(model)
        beside = save_graphs(models, out)
        written = with_files(out, components, [[component.file, *beside] for component in components])
        return written, model.opset_imports.get("")

    def _inline(self, model: object, out: Path) -> None:
        """Put the weights into the graph file.

        Raises:
            ExportError: They are too large for one protobuf file.
        """
        import onnx_ir

        assert isinstance(model, onnx_ir.Model)
        size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
        if size > _INLINE_LIMIT_BYTES:
            raise ExportError(
                f"{size} bytes of weights do not fit into one file.", fix="leave external_data=False out."
            )
        (out / f"{GRAPH}.data").unlink(missing_ok=True)
        write_graph(model, out / GRAPH)


def _component(source: Source, model: onnx_ir.Model, file: str, unused: tuple[str, ...]) -> Component:
    """What the manifest says of a graph; its files are recorded once they are written."""
    return Component(
        name=source.name,
        file=file,
        files=(),
        inputs=graph_specs(model.graph.inputs, source.config),
        outputs=graph_specs(model.graph.outputs),
        max_sizes=source.max_sizes,
        unused_inputs=tuple(dict.fromkeys((*source.unused_inputs, *unused))),
        own_defaults=source.own_defaults,
        stateful=source.stateful,
        croppable=source.croppable,
        continues=source.continues,
        domains=operator_domains(model),
    )
