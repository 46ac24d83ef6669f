"""Export of PyTorch models to OpenVINO IR, traced with torch.export. An int8 model in IR that was converted from ONNX
runs 1.5 to 2 times slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from accel.artifact import MANIFEST, MARK, Artifact, Component, Manifest, Step, TensorSpec, record_files, tool_versions
from accel.capture import AXIS_STEPS, Source, capture_openvino, first_lines, graph_name, quiet, split
from accel.config import ExportConfig, OptimizeConfig, QuantizeConfig
from accel.errors import ConfigError, ExportError
from accel.interfaces.protocols import QuantizedExport

from . import FORMAT, quantized_layer_conversion, recurrence
from .checkpoint_weights import CheckpointWeights
from .divisions import divide_down
from .fully_masked_tokens import zero_hidden_tokens
from .node_names import count_from, last_number
from .runtime import adapt
from .state import fold_cache
from .unit_axes import keep_unit_axes

GRAPH = "openvino_model.xml"
# Two sizes for each axis, to recognize the axis in the output shapes. All sizes are different, and they are unlikely to
# occur as fixed sizes in a model.
_PROBES = ((11, 13, 17, 19, 23), (29, 31, 37, 41, 43))
VERSIONS = ("torch", "transformers", "openvino", "nncf")


class OpenVinoExporter:
    """Exporter that writes `openvino_model.xml` and `.bin`, the `accel` manifest and the manifest of transformers'
    exporter.

    Args:
        quantizer: A function that returns the backend's quantizer, for `export_quantized`.
    """

    def __init__(self, quantizer: Callable[[], Any]) -> None:
        self._quantizer = quantizer

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Trace, convert and write the model; see `accel.interfaces.protocols.Exporter`."""
        _check(config)
        parts = split(source)
        components = []
        for part in parts:
            exported, component = self._graph(part, alone=len(parts) == 1)
            with quiet():
                if len(parts) == 1:
                    exported.save_pretrained(out)
                else:
                    ov.save_model(exported.program, out / component.file, compress_to_fp16=False)
            components.append(_with_files(component, out))
        return Artifact.create(out, self._manifest(source, task, config, components))

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
        _check(config)
        quantizer = self._quantizer()
        quantizer.check_one_pass(quantize)
        assert source.streamed is not None
        weights = CheckpointWeights(source.streamed)
        with source.streamed.without_values(source.model):
            parts = split(source)
        alone = len(parts) == 1
        with source.streamed.zeros():
            graphs = [self._graph(part, alone=alone) for part in parts]
            components = [component for _, component in graphs]
            artifact = Artifact(out, self._manifest(source, task, config, components))
            started = time.perf_counter()
            models = [exported.program for exported, _ in graphs]
            graphs.clear()
            for place, component in enumerate(components):
                model = models.pop(0)
                adapt(model, component)
                weights.check(model)
                with weights.read_by_nncf():
                    quantized = quantizer.compress(model, quantize)
                weights.fill(quantized)
                components[place] = write_graph(quantized, component, out, alone=alone)
                weights.add_file(out / component.file)
        artifact = quantizer.finished(artifact, out, components, quantize)
        artifact = artifact.with_step(seconds=round(time.perf_counter() - started, 2))
        return QuantizedExport(artifact, weights.readers(source))

    def _manifest(self, source: Source, task: str, config: ExportConfig, components: Sequence[Component]) -> Manifest:
        step = Step(stage="export", backend="openvino", config=config.to_dict(), versions=tool_versions(*VERSIONS))
        return Manifest(
            format=FORMAT,
            task=task,
            architecture=source.architecture,
            dtype=source.dtype,
            source=source.origin,
            components=tuple(components),
            steps=(step,),
        )

    def _graph(self, source: Source, *, alone: bool) -> tuple[Any, Component]:
        """Convert a model to one graph. The KV cache of a decoder becomes part of the graph.

        Returns:
            The export object of transformers with the graph, and the component without records of its files.
        """
        last = last_number()
        exported = capture_openvino(source, (*recurrence.CONVERSIONS, *quantized_layer_conversion.CONVERSIONS))
        model: ov.Model = exported.program
        input_names = [port.any_name for port in model.inputs]
        specs = _input_specs(model, source)
        outputs = output_specs(model, specs, source.max_sizes)
        if source.stateful:
            pairs = {name: name.replace("past", "present", 1) for name in input_names if name.startswith("past")}
            fold_cache(model, pairs, specs)
            specs = tuple(spec for spec in specs if spec.name not in pairs)
            outputs = tuple(spec for spec in outputs if spec.name not in pairs.values())
        zero_hidden_tokens(model)
        divide_down(model)
        keep_unit_axes(model)
        for port in (*model.inputs, *model.outputs):
            port.get_tensor().set_names({graph_name(port.any_name)})
        specs, outputs = (tuple(replace(s, name=graph_name(s.name)) for s in group) for group in (specs, outputs))
        file = graph_file(source.name, alone=alone)
        model.set_rt_info(MANIFEST, MARK.split("."))
        count_from(model, last)
        unused = (*source.unused_inputs, *(name for name in source.example if name not in input_names))
        component = Component(
            name=source.name if source.stateful or not alone else "model",
            file=file,
            files=(),
            inputs=specs,
            outputs=outputs,
            max_sizes=source.max_sizes,
            unused_inputs=tuple(dict.fromkeys(unused)),
            own_defaults=source.own_defaults,
            stateful=source.stateful,
            croppable=source.croppable,
            continues=source.continues,
        )
        return exported, component


def _check(config: ExportConfig) -> None:
    if config.opset is not None:
        raise ConfigError(f"opset is {config.opset}, but OpenVINO IR does not use ONNX opsets.", fix="leave opset out.")


def graph_file(component: str, *, alone: bool) -> str:
    """Return the file name of a component's graph: `openvino_model.xml` for a single graph, or for example
    `openvino_encoder.xml` for one of several graphs.
    """
    return GRAPH if alone else f"openvino_{component}.xml"


def weights_file(graph: str) -> str:
    """Return the name of the file with a graph's weights."""
    return str(Path(graph).with_suffix(".bin"))


def write_graph(model: ov.Model, component: Component, out: Path, *, alone: bool) -> Component:
    """Write a component's graph and weights. Return the component with its new files."""
    file = graph_file(component.name, alone=alone)
    model.set_rt_info(MANIFEST, MARK.split("."))
    with quiet():
        ov.save_model(model, out / file, compress_to_fp16=False)
    return _with_files(replace(component, file=file, domains=None), out)


def _with_files(component: Component, out: Path) -> Component:
    """Return the component with records of its files."""
    return replace(component, files=record_files(out, (component.file, weights_file(component.file))))


def _input_specs(model: ov.Model, source: Source) -> tuple[TensorSpec, ...]:
    """Return the specs of the captured inputs, with axis names."""
    pad = getattr(source.config, "pad_token_id", None)
    specs = []
    for port in model.inputs:
        name = port.any_name
        axes = source.axes.get(name, {})
        shape = tuple(axes.get(i, size) for i, size in enumerate(source.example[name].shape))
        specs.append(input_spec(name, port, shape, pad if isinstance(pad, int) and pad >= 0 else 0))
    return tuple(specs)


def input_spec(name: str, port: ov.Output, shape: tuple[int | str, ...], pad: int) -> TensorSpec:
    """Return the spec of an input. Its role and padding value follow from the input names of transformers models."""
    return TensorSpec(
        name,
        dtype_word(port.element_type),
        shape,
        role="mask" if name == "attention_mask" else "data",
        pad_value=pad if name == "input_ids" else 0,
    )


def dtype_word(type_: ov.Type) -> str:
    """Return the PyTorch name of an OpenVINO element type."""
    return "bfloat16" if type_ == ov.Type.bf16 else str(np.dtype(type_.to_dtype()))


def output_specs(
    model: ov.Model, inputs: tuple[TensorSpec, ...], limits: Mapping[str, int] | None = None
) -> tuple[TensorSpec, ...]:
    """Return the output specs of a graph, with axis names.

    OpenVINO does not name axes. Output shapes are computed for two sets of input sizes, and an output axis gets the
    name of the input axis that has the same size both times. The sizes stay within `limits`, the model's maximum number
    of positions.
    """
    axes = list(dict.fromkeys(axis for spec in inputs for axis in spec.shape if isinstance(axis, str)))
    probes = [
        {axis: size * AXIS_STEPS.get(axis, 1) for axis, size in zip(axes, sizes, strict=False)} for sizes in _PROBES
    ]
    for times, sizes_by_axis in enumerate(probes, start=2):
        if {"texts", "batch"} <= set(sizes_by_axis):
            # Each image has the same number of texts, so the number of texts must be a multiple of the batch size.
            sizes_by_axis["texts"] = times * sizes_by_axis["batch"]
    for axis, limit in (limits or {}).items():
        if probes[1].get(axis, 0) > limit:
            probes[0][axis], probes[1][axis] = max(1, limit // 2), limit
    shapes = [_probe(model, inputs, sizes) for sizes in probes]
    specs = []
    for index, port in enumerate(model.outputs):
        name = port.any_name
        dims: list[int | str] = []
        for position, pair in enumerate(zip(*(probe[index] for probe in shapes), strict=True)):
            named = [axis for axis in axes if pair == (probes[0][axis], probes[1][axis])]
            fixed = pair[0] if pair[0] == pair[1] and pair[0] >= 0 else None
            dims.append(named[0] if named else fixed if fixed is not None else f"{name}_{position}")
        specs.append(TensorSpec(name, dtype_word(port.element_type), tuple(dims)))
    return tuple(specs)


def _probe(model: ov.Model, inputs: tuple[TensorSpec, ...], sizes: Mapping[str, int]) -> list[list[int]]:
    """Return the output shapes of a graph for the given input sizes. A size is -1 if it depends on values."""
    if "capacity" in sizes:
        # The mask covers the tokens in the cache and the new tokens.
        sizes = {**sizes, "total": sizes["capacity"] + sizes["sequence"]}
    copy = model.clone()
    try:
        copy.reshape(
            {s.name: ov.PartialShape([n if isinstance(n, int) else sizes[n] for n in s.shape]) for s in inputs}
        )
    # OpenVINO raises RuntimeError for shapes that do not fit together.
    except RuntimeError as error:
        raise ExportError(
            f"The exported OpenVINO graph fails for inputs of the sizes {dict(sizes)}: {first_lines(error, 3)}",
            fix="export the model to ONNX, which uses a different converter: leave backend='openvino' out.",
        ) from error
    return [[d.get_length() if d.is_static else -1 for d in port.partial_shape] for port in copy.outputs]
