"""Export of a PyTorch model to an ONNX artifact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from accel.artifact import MANIFEST, MARK, Artifact, Component, Manifest, Step, record_files, tool_versions, with_files
from accel.capture import Source, capture_onnx, drop_unused_inputs, graph_specs, quiet, split
from accel.config import ExportConfig
from accel.errors import ConfigError, ExportError

from ..graph.editing import merge_initializers, operator_domains, read_graph, save_graphs, write_graph
from .attention_operators import OrtAttention
from .lazy_weights import release_when_written
from .quantized import lower_quantized_layers
from .recurrence import expand_recurrences

GRAPH = "model.onnx"
_INLINE_LIMIT_BYTES = 1 << 30


class OnnxExporter:
    """Exporter that writes `model.onnx`, its weights in `model.onnx.data`, transformers' export manifest and accel's manifest."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Trace the model, convert it and write the artifact; see `accel.interfaces.protocols.Exporter`."""
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
        """Export the model as a single graph, with transformers' exporter."""
        model, exported, component = _captured(source, config, GRAPH)
        model.metadata_props[MARK] = MANIFEST
        with quiet():
            exported.save_pretrained(out)
            if config.external_data:
                write_graph(read_graph(out / GRAPH), out / GRAPH)
            else:
                _inline(model, out)
        files = [name for name in (GRAPH, f"{GRAPH}.data") if (out / name).exists()]
        return (replace(component, files=record_files(out, files)),), model.opset_imports.get("")

    def _parts(
        self, parts: tuple[Source, ...], config: ExportConfig, out: Path
    ) -> tuple[tuple[Component, ...], int | None]:
        """Export the graphs of a generative model; all graphs share one file of weights."""
        if not config.external_data:
            raise ConfigError(
                "external_data=False is not possible for this model: its graphs share their weights, so the weights need a separate file.",
                fix="leave external_data=False out.",
            )
        models, components = {}, []
        for part in parts:
            model, _, component = _captured(part, config, f"{part.name}.onnx")
            models[component.file] = model
            components.append(component)
        weights = save_graphs(models, out)
        written = with_files(out, components, [[component.file, *weights] for component in components])
        return written, model.opset_imports.get("")


def _inline(model: ir.Model, out: Path) -> None:
    """Write the graph file with the weights inside it.

    Raises:
        ExportError: The weights are too large for one protobuf file.
    """
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    if size > _INLINE_LIMIT_BYTES:
        raise ExportError(
            f"The weights have {size} bytes; accel writes at most {_INLINE_LIMIT_BYTES} bytes of weights into the ONNX file itself.",
            fix="leave external_data=False out.",
        )
    (out / f"{GRAPH}.data").unlink(missing_ok=True)
    write_graph(model, out / GRAPH)


def _captured(source: Source, config: ExportConfig, file: str) -> tuple[ir.Model, Any, Component]:
    """Trace a model and replace the operators that runtimes do not support.

    Returns:
        The graph, the export object of transformers, and the component. The caller adds the component's file records
        after the files are written.
    """
    model, exported = capture_onnx(source, config)
    expand_recurrences(model)
    lower_quantized_layers(model)
    merge_initializers(model)
    component = _component(source, model, file, drop_unused_inputs(model))
    release_when_written(model)
    return model, exported, component


def _component(source: Source, model: ir.Model, file: str, unused: tuple[str, ...]) -> Component:
    """Return the manifest entry of a graph; the caller adds the file records after the files are written."""
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
