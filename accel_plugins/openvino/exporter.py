"""PyTorch model to OpenVINO IR, captured from torch: IR made from the ONNX file runs int8 1.5 to 2 times slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import openvino as ov

from accel.artifact import MANIFEST, MARK, Artifact, Component, Manifest, Step, TensorSpec, record_files, tool_versions
from accel.capture import AXIS_STEPS, Source, capture_openvino, first_lines, graph_name, quiet, split
from accel.config import ExportConfig
from accel.errors import ConfigError, ExportError

from . import FORMAT, quantized, recurrence
from .divisions import divide_down
from .masked_rows import zero_hidden_tokens
from .state import fold_cache
from .unit_axes import keep_unit_axes

GRAPH = "openvino_model.xml"
WEIGHTS = "openvino_model.bin"
# Two sizes of every axis, all different and unlikely as sizes of anything else in a model.
_PROBES = ((11, 13, 17, 19, 23), (29, 31, 37, 41, 43))
VERSIONS = ("torch", "transformers", "openvino", "nncf")


class OpenVinoExporter:
    """Writes `openvino_model.xml` and `.bin`, and transformers' own manifest beside ours."""

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Trace, convert and write; see `accel.interfaces.protocols.Exporter`."""
        if config.opset is not None:
            raise ConfigError("OpenVINO IR has no opset to choose.", fix="leave opset out.")
        parts = split(source)
        components = tuple(self._component(part, out, alone=len(parts) == 1) for part in parts)
        step = Step(stage="export", backend="openvino", config=config.to_dict(), versions=tool_versions(*VERSIONS))
        manifest = Manifest(
            format=FORMAT,
            task=task,
            architecture=source.architecture,
            dtype=source.dtype,
            source=source.origin,
            components=components,
            steps=(step,),
        )
        return Artifact.create(out, manifest)

    def _component(self, source: Source, out: Path, *, alone: bool) -> Component:
        """Write one graph, the cache of a decoder inside it."""
        exported = capture_openvino(source, (*recurrence.CONVERSIONS, *quantized.CONVERSIONS))
        model: ov.Model = exported.program
        taken = {port.any_name for port in model.inputs}
        specs = _input_specs(model, source)
        outputs = output_specs(model, specs, source.max_sizes)
        if source.stateful:
            pairs = {name: name.replace("past", "present", 1) for name in taken if name.startswith("past")}
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
        with quiet():
            if alone:
                exported.save_pretrained(out)
            else:
                ov.save_model(model, str(out / file), compress_to_fp16=False)
        unused = (*source.unused_inputs, *(name for name in source.example if name not in taken))
        return Component(
            name=source.name if source.stateful or not alone else "model",
            file=file,
            files=record_files(out, (file, weights_file(file))),
            inputs=specs,
            outputs=outputs,
            max_sizes=source.max_sizes,
            unused_inputs=tuple(dict.fromkeys(unused)),
            own_defaults=source.own_defaults,
            stateful=source.stateful,
            croppable=source.croppable,
            continues=source.continues,
        )


def graph_file(component: str, *, alone: bool) -> str:
    """The file of a component's graph: `openvino_model.xml`, or `openvino_encoder.xml` and the like of several."""
    return GRAPH if alone else f"openvino_{component}.xml"


def weights_file(graph: str) -> str:
    """The file of a graph's weights, beside it."""
    return str(Path(graph).with_suffix(".bin"))


def write_graph(model: ov.Model, component: Component, out: Path, *, alone: bool) -> Component:
    """Write a component's graph and weights; gives the component with its new files."""
    file = graph_file(component.name, alone=alone)
    model.set_rt_info(MANIFEST, MARK.split("."))
    with quiet():
        ov.save_model(model, out / file, compress_to_fp16=False)
    return replace(component, file=file, files=record_files(out, (file, weights_file(file))), domains=None)


def _input_specs(model: ov.Model, source: Source) -> tuple[TensorSpec, ...]:
    """The captured inputs, with the axes that the core named."""
    pad = getattr(source.config, "pad_token_id", None)
    specs = []
    for port in model.inputs:
        name = port.any_name
        axes = source.axes.get(name, {})
        shape = tuple(axes.get(i, size) for i, size in enumerate(source.example[name].shape))
        specs.append(input_spec(name, port, shape, pad if isinstance(pad, int) and pad >= 0 else 0))
    return tuple(specs)


def input_spec(name: str, port: ov.Output, shape: tuple[int | str, ...], pad: int) -> TensorSpec:
    """An input as a spec, with the role and pad value of a transformers model's name."""
    return TensorSpec(
        name,
        dtype_word(port.element_type),
        shape,
        role="mask" if name == "attention_mask" else "data",
        pad_value=pad if name == "input_ids" else 0,
    )


def dtype_word(type_: ov.Type) -> str:
    """An OpenVINO element type in torch's words."""
    name = str(type_.get_type_name())
    if name == "boolean":
        return "bool"
    for short, long in (("bf", "bfloat"), ("f", "float"), ("i", "int"), ("u", "uint")):
        if name.startswith(short):
            return long + name.removeprefix(short)
    return name


def output_specs(
    model: ov.Model, inputs: tuple[TensorSpec, ...], limits: Mapping[str, int] | None = None
) -> tuple[TensorSpec, ...]:
    """Outputs as specs: OpenVINO names no axes, so each is recognised by its size under two sets of input sizes, up to what the model
    has positions for.
    """
    axes = list(dict.fromkeys(axis for spec in inputs for axis in spec.shape if isinstance(axis, str)))
    probes = [
        {axis: size * AXIS_STEPS.get(axis, 1) for axis, size in zip(axes, sizes, strict=False)} for sizes in _PROBES
    ]
    for times, made in enumerate(probes, start=2):
        if {"texts", "batch"} <= set(made):
            # Where texts belong to images, each image has as many.
            made["texts"] = times * made["batch"]
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
    """Output shapes for these sizes; -1 where they depend on values."""
    if "capacity" in sizes:
        # A cache that holds exactly what came before the new tokens.
        sizes = {**sizes, "total": sizes["capacity"] + sizes["sequence"]}
    copy = model.clone()
    try:
        copy.reshape(
            {s.name: ov.PartialShape([n if isinstance(n, int) else sizes[n] for n in s.shape]) for s in inputs}
        )
    # What OpenVINO raises for a graph that does not fit together.
    except RuntimeError as error:
        raise ExportError(
            f"OpenVINO's graph fails at inputs of sizes {dict(sizes)}: {first_lines(error, 3)}",
            fix="export to ONNX (leave backend='openvino' out), which another converter makes.",
        ) from error
    return [[d.get_length() if d.is_static else -1 for d in port.partial_shape] for port in copy.outputs]
