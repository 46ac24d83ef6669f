"""Export of a PyTorch model to an ONNX artifact."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from accel.artifact import MANIFEST, MARK, Artifact, Component, Manifest, Step, record_files, tool_versions, with_files
from accel.capture import (
    FusedAttention,
    Source,
    capture_onnx,
    drop_unused_inputs,
    graph_specs,
    quiet,
    split,
    write_export_manifest,
)
from accel.config import ExportConfig, OptimizeConfig, QuantizeConfig
from accel.errors import ConfigError, ExportError
from accel.interfaces.protocols import QuantizedExport

from ..graph.editing import (
    as_in_graphs,
    as_read_again,
    merge_initializers,
    operator_domains,
    read_graph,
    save_graphs,
    write_artifact,
    write_graph,
)
from .attention_operators import OrtAttention
from .dequantized_weights import quantized_weights
from .lazy_weights import read_from_checkpoint, release_when_written
from .quantized import lower_quantized_layers
from .recurrence import expand_recurrences
from .scatter_sums import expand_scatter_sums

GRAPH = "model.onnx"
_INLINE_LIMIT_BYTES = 1 << 30
_ORT_ATTENTION = OrtAttention()


class OnnxExporter:
    """Exporter that writes `model.onnx`, its weights in `model.onnx.data`, transformers' export manifest and accel's manifest.

    Args:
        backend: The name of the backend that uses the exporter, for the manifest.
        optimizer: A function that returns the backend's `OrtOptimizer`.
        quantizer: A function that returns the backend's `GraphQuantizer`.
        attention: The attention operators of decoders. With `None`, the graphs contain only standard ONNX operators, without additions by
            `ScatterElements`, which TensorRT does not support.
    """

    def __init__(
        self,
        backend: str,
        optimizer: Callable[[], Any] = lambda: None,
        quantizer: Callable[[], Any] = lambda: None,
        attention: FusedAttention | None = _ORT_ATTENTION,
    ) -> None:
        self._backend = backend
        self._optimizer = optimizer
        self._quantizer = quantizer
        self._attention = attention
        self._standard = attention is None

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Trace the model, convert it and write the artifact; see `accel.interfaces.protocols.Exporter`."""
        parts = split(source, self._attention)
        if parts == (source,):
            components, opset = self._single(source, config, out)
        else:
            components, opset = self._parts(parts, config, out)
        return Artifact.create(out, self._manifest(source, task, config, components, opset))

    def export_quantized(
        self,
        source: Source,
        *,
        task: str,
        config: ExportConfig,
        optimize: OptimizeConfig | None,
        quantize: QuantizeConfig,
        out: Path,
    ) -> QuantizedExport:
        """Write a quantized artifact; see `accel.interfaces.protocols.QuantizingExporter`."""
        assert source.streamed is not None
        with source.streamed.without_values(source.model):
            parts = split(source, self._attention)
        graphs, components = {}, []
        for part in parts:
            file = GRAPH if parts == (source,) else f"{part.name}.onnx"
            graph, exported, component = _captured(part, config, file, self._standard)
            graphs[file] = graph
            components.append(component)
            if parts == (source,):
                write_export_manifest(exported, out)
        opset = graph.opset_imports.get("")
        artifact = Artifact(out, self._manifest(source, task, config, tuple(components), opset))
        models = _by_component(components, as_read_again(graphs))
        if optimize is not None:
            started = time.perf_counter()
            step, _ = self._optimizer().rewrite(artifact, models, config=optimize)
            step = replace(step, seconds=round(time.perf_counter() - started, 2))
            manifest = replace(artifact.manifest, steps=(*artifact.manifest.steps, step))
            artifact = as_in_graphs(Artifact(out, manifest), models)
            files = {component.file: models[component.name] for component in components}
            models = _by_component(components, as_read_again(files))
        started = time.perf_counter()
        step, record = self._quantizer().rewrite(artifact, models, config=quantize)
        step = replace(step, seconds=round(time.perf_counter() - started, 2))
        artifact = write_artifact(artifact, models, out, step=step, quantization=record)
        return QuantizedExport(artifact, quantized_weights(source, models, artifact))

    def _manifest(
        self, source: Source, task: str, config: ExportConfig, components: tuple[Component, ...], opset: int | None
    ) -> Manifest:
        step = Step(
            stage="export",
            backend=self._backend,
            config=config.to_dict(),
            versions=tool_versions("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime"),
        )
        return Manifest(
            format="onnx",
            task=task,
            architecture=source.architecture,
            dtype=source.dtype,
            opset=opset,
            source=source.origin,
            components=components,
            steps=(step,),
        )

    def _single(self, source: Source, config: ExportConfig, out: Path) -> tuple[tuple[Component, ...], int | None]:
        """Export the model as a single graph, with transformers' exporter."""
        model, exported, component = _captured(source, config, GRAPH, self._standard)
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
            model, _, component = _captured(part, config, f"{part.name}.onnx", self._standard)
            models[component.file] = model
            components.append(component)
        weights = save_graphs(models, out)
        written = with_files(out, components, [[component.file, *weights] for component in components])
        return written, model.opset_imports.get("")


def _by_component(components: Sequence[Component], graphs: Mapping[str, ir.Model]) -> dict[str, ir.Model]:
    return {component.name: graphs[component.file] for component in components}


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


def _captured(source: Source, config: ExportConfig, file: str, standard: bool) -> tuple[ir.Model, Any, Component]:
    """Trace a model and replace the operators that runtimes do not support.

    Args:
        source: The model.
        config: The settings of the export.
        file: The name of the graph file.
        standard: Whether the graph is for runtimes other than ONNX Runtime.

    Returns:
        The graph, the export object of transformers, and the component. The caller adds the component's file records
        after the files are written.
    """
    model, exported = capture_onnx(source, config)
    expand_recurrences(model)
    lower_quantized_layers(model)
    if standard:
        expand_scatter_sums(model)
    merge_initializers(model)
    component = _component(source, model, file, drop_unused_inputs(model))
    if standard:
        component = _with_grown_mask(component)
    if source.streamed is not None:
        read_from_checkpoint(model, source.streamed)
    else:
        release_when_written(model)
    return model, exported, component


def _with_grown_mask(component: Component) -> Component:
    """Return the component with the attention mask as long as the keys after a call, if the KV cache grows with each call.

    The trace gives both lengths different names if the mask is expanded before it is added to the scores.
    """
    presents = {spec.name: spec.shape for spec in component.outputs}
    grown = {presents[s.pair][2] for s in component.inputs if s.pair in presents and len(presents[s.pair]) == 4}
    length = next(iter(grown), None)
    if len(grown) != 1 or not isinstance(length, str) or " + " not in length:
        return component
    inputs = tuple(
        replace(spec, shape=(*spec.shape[:-1], length))
        if spec.name == "attention_mask" and spec.shape[-1] == "total"
        else spec
        for spec in component.inputs
    )
    return replace(component, inputs=inputs)


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
