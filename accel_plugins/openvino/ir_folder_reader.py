"""Reader for folders of OpenVINO IR without an `accel` manifest, as optimum-intel and transformers' exporter write
them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openvino as ov

from accel.artifact import (
    MARK,
    Artifact,
    Component,
    Manifest,
    Origin,
    Quantization,
    TensorSpec,
    check_file,
    lost_manifest,
    read_json,
    stamp_files,
)
from accel.errors import ArtifactNotFoundError, ExportError, IntegrityError, SessionError
from accel.interfaces.family_registry import max_text_sizes
from accel.interfaces.folder_reader import Part
from accel.interfaces.task_registry import infer_task, read_config, task_spec

from . import FORMAT
from .exporter import GRAPH, dtype_word, input_spec, output_specs
from .runtime import READ_ERRORS, core, missing_weights, one_line
from .state import BEAM_INDEX

logger = logging.getLogger(__name__)

ENCODER, DECODER, FOLLOWING = (f"openvino_{part}_model.xml" for part in ("encoder", "decoder", "decoder_with_past"))
DECODE = "openvino_decode.xml"
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_TEXT_AXES = {2: ("batch", "sequence"), 3: ("batch", "choices", "sequence")}
# Axis names, the same as in an export by `accel`. The sizes that are tried for these axes are large enough for strided
# convolutions.
_INPUT_AXES = {
    ("pixel_values", 4): ("batch", "channels", "height", "width"),
    ("input_values", 2): ("batch", "samples"),
    ("input_values", 3): ("batch", "frames", "bins"),
}
_DECODER_AXES = {
    "input_ids": ("batch", "sequence"),
    "position_ids": ("batch", "sequence"),
    "encoder_attention_mask": ("batch", "encoder_sequence"),
    "encoder_hidden_states": ("batch", "encoder_sequence"),
}


class OpenVinoFolderReader:
    """Folder reader for OpenVINO IR; see `accel.interfaces.folder_reader.FolderReader`. Variants and parts exist only
    in ONNX folders.
    """

    def choose(
        self, name: str, files: Sequence[str], *, file_name: str | None = None, variant: str | None = None
    ) -> list[str]:
        """Return the named graph file, or all graph files."""
        return [file for file in files if "/" not in file and file.endswith(".xml") and file_name in (None, file)]

    def parts(
        self, folder: Path, *, file_name: str | None = None, variant: str | None = None, encoder: bool = False
    ) -> Mapping[Part, str]:
        """Return an empty mapping: OpenVINO graphs are not split into parts."""
        return {}

    def adopt(
        self,
        folder: Path,
        *,
        task: str | None = None,
        subfolder: str = "",
        file_name: str | None = None,
        variant: str | None = None,
    ) -> Artifact:
        """Return an artifact for `openvino_model.xml` and `.bin`, or for the graphs of an encoder and a decoder.

        Raises:
            ArtifactNotFoundError: The graph file is missing; the message lists the graphs in the folder.
            IntegrityError: The `.bin` file with the weights is missing, or the graph cannot be read or does not match
                its config.
            SessionError: The graph keeps a state between calls, but the task uses no state.
        """
        if variant is not None:
            raise ArtifactNotFoundError(
                f"variant={variant!r} selects an ONNX graph, but {folder} contains no ONNX graphs.",
                fix="leave variant=... out.",
            )
        config = read_config(folder)
        return _adopted(folder, folder / subfolder, file_name or GRAPH, task or infer_task(config, folder), config)


def _adopted(root: Path, folder: Path, named: str, task: str, config: dict[str, Any]) -> Artifact:
    """Return an artifact for the OpenVINO graphs in `folder`; the config file of the model is in `root`."""
    generates = task_spec(task).generates
    several = generates and (bool(config.get("is_encoder_decoder")) or (folder / ENCODER).is_file())
    if generates and not (folder / named).is_file() and (folder / DECODE).is_file():
        # Exports by transformers have this file name. The graph accepts several tokens after earlier tokens, so it also
        # accepts a prompt.
        named = DECODE
        _check_decode(folder)
    models = {"encoder": ENCODER, "decoder": DECODER} if several else {"model": named}
    read = {name: _read(folder, file, root) for name, file in models.items()}
    builders = {"encoder": _encoder, "model": _decoder if generates else _single, "decoder": _decoder}
    architecture = str((config.get("architectures") or [""])[0])
    components = []
    for name, model in read.items():
        component = builders[name](name, model, config, folder / models[name])
        graph = (folder / models[name]).relative_to(root)
        files = stamp_files(root, [path.as_posix() for path in (graph, graph.with_suffix(".bin"))])
        components.append(replace(component, file=files[0].name, files=files))
    if several and components[1].continues == "none" and (folder / FOLLOWING).is_file():
        logger.warning(
            "The decoder in %s has its KV cache as graph inputs and outputs, in a second graph. OpenVINO uses only the graph without "
            "a cache, so each generated token computes all earlier tokens again. For faster generation, export the model without "
            "--disable-stateful, or with `accel export --backend openvino`.",
            folder,
        )
    main = read.get("model") or read["decoder"]
    scheme = _scheme(main)
    manifest = Manifest(
        format=FORMAT,
        task=task,
        architecture=architecture,
        dtype=_dtype(main),
        source=Origin(id=str(root)),
        components=tuple(components),
        quantization=Quantization(scheme=scheme) if scheme else None,
    )
    return Artifact(root.absolute(), manifest)


def _check_decode(folder: Path) -> None:
    """Raise if a decoder graph accepts only one token per call. Only the file `export.json` of transformers' exporter
    contains this information.

    Raises:
        IntegrityError: The graph was traced with one token.
    """
    export = folder / "export.json"
    shape: Any = read_json(export) if export.is_file() else {}
    for key in ("components", "decode", "metadata", "kwargs", "input_ids", "shape"):
        shape = shape.get(key) if isinstance(shape, dict) else None
    if not isinstance(shape, list) or len(shape) != 2 or shape[1] == 1:
        raise IntegrityError(
            f"The graph {folder / DECODE} accepts only one token per call, so it cannot read a prompt.",
            fix="export the model with multi_token_decode=True, or with `accel export MODEL OUT --backend openvino`.",
        )


def _read(folder: Path, file: str, root: Path) -> ov.Model:
    path = folder / file
    if not path.is_file():
        have = ", ".join(sorted(p.name for p in folder.glob("*.xml"))) or "none"
        raise ArtifactNotFoundError(
            f"{folder} has no graph file {file}; its graph files are: {have}.",
            fix=f"export the model again, or rename the graph file to {file}.",
        )
    if not path.with_suffix(".bin").is_file():
        raise missing_weights(path)
    for file_path in (path, path.with_suffix(".bin")):
        check_file(file_path, root, fix="copy the file itself into the folder.")
    try:
        model = core().read_model(str(path))
    except READ_ERRORS as error:
        raise IntegrityError(
            f"OpenVINO cannot read the graph {path}: {one_line(error)}", fix="copy the model again, or export it again."
        ) from error
    if model.has_rt_info(MARK.split(".")):
        raise lost_manifest(path)
    return model


def _single(name: str, model: ov.Model, config: dict[str, Any], path: Path) -> Component:
    """Return the component of a graph without a KV cache."""
    if model.get_sinks():
        raise SessionError(
            f"The graph {path} keeps a state between calls, but its task does not use a state.",
            fix="open the folder with the task that the graph was exported for: task=...",
        )
    pad = config.get("pad_token_id")
    rows = _rows(model)
    specs = (
        input_spec(port.any_name, port, _named_shape(port, model), pad if isinstance(pad, int) else 0)
        for port in model.inputs
    )
    inputs = tuple(replace(s, bounds=(0, rows[s.name] - 1)) if s.name in rows else s for s in specs)
    try:
        outputs = output_specs(model, inputs)
    except ExportError:
        # A graph with dynamic height and width may still have position embeddings for only one image size.
        sizes = _image_sizes(config)
        if not sizes:
            raise
        inputs = tuple(
            replace(s, shape=tuple(sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in s.shape))
            for s in inputs
        )
        outputs = output_specs(model, inputs)
    return Component(
        name=name,
        file="",
        files=(),
        inputs=inputs,
        outputs=outputs,
        max_sizes=max_text_sizes(config) if name == "model" else {},
    )


def _rows(model: ov.Model) -> dict[str, int]:
    """Return the smallest number of rows of the embedding tables that an id input indexes, by the name of the input.

    OpenVINO does not check ids: an id that is out of range gives arbitrary values.
    """
    limits: dict[str, int] = {}
    for node in model.get_ops():
        if node.get_type_name() != "Gather":
            continue
        table, ids = node.input_value(0).get_partial_shape(), node.input_value(1).get_node()
        while ids.get_type_name() == "Convert":
            ids = ids.input_value(0).get_node()
        axis = node.input_value(2).get_node()
        by_row = axis.get_type_name() == "Constant" and not axis.get_data().any()
        if ids.get_type_name() != "Parameter" or not by_row or table.rank.is_dynamic or not table[0].is_static:
            continue
        # An attention mask that chooses between two vectors is also an index, but it contains no ids.
        for name in ids.output(0).get_names() & set(_TEXT) - {"attention_mask"}:
            size = table[0].get_length()
            limits[name] = min(size, limits.get(name, size))
    return limits


def _encoder(name: str, model: ov.Model, _: dict[str, Any], path: Path) -> Component:
    """Return the component of an encoder graph, which reads text, audio or an image."""
    output = model.output("last_hidden_state") if "last_hidden_state" in _names(model.outputs) else None
    if output is None or len(output.partial_shape) != 3:
        raise IntegrityError(
            f"The graph {path} returns the outputs {sorted(_names(model.outputs))}, but an encoder must return last_hidden_state "
            "with 3 dimensions.",
            fix="export the model again: `accel export MODEL OUT --backend openvino`.",
        )
    inputs = tuple(input_spec(port.any_name, port, _named_shape(port, model), 0) for port in model.inputs)
    axes = ("batch", "sequence" if "input_ids" in _names(model.inputs) else "encoder_sequence", "hidden")
    sizes = zip(axes, output.partial_shape, strict=True)
    shape = tuple(dim.get_length() if dim.is_static and axis != "batch" else axis for axis, dim in sizes)
    return Component(
        name=name,
        file="",
        files=(),
        inputs=inputs,
        outputs=(TensorSpec("last_hidden_state", dtype_word(output.element_type), shape),),
    )


def _names(ports: Iterable[ov.Output]) -> set[str]:
    return {name for port in ports for name in port.get_names()}


def _decoder(name: str, model: ov.Model, config: dict[str, Any], path: Path) -> Component:
    """Return the component of a decoder graph. Its KV cache is inside the graph or in inputs and outputs, or it has
    none.

    Raises:
        IntegrityError: The graph has unknown inputs or belongs to another model.
    """
    inside = {str(sink.get_variable_id()) for sink in model.get_sinks()}
    pairs = cache_pairs(model)
    cached = bool(inside or pairs)
    specs = []
    for port in model.inputs:
        if port.any_name == BEAM_INDEX:
            continue
        names_of_axes = {**_DECODER_AXES, "attention_mask": ("batch", "total" if cached else "sequence")}
        axes: tuple[str | None, ...] | None = names_of_axes.get(port.any_name)
        if port.any_name in pairs:
            axes = ("batch", None, "past", None)
        if axes is None:
            raise IntegrityError(
                f"The decoder graph {path} has the input {port.any_name!r}, which accel does not support.",
                fix="export the model again: `accel export MODEL OUT --backend openvino`.",
            )
        shape = tuple(
            dim.get_length() if dim.is_static else (axes[i] if i < len(axes) else None) or f"{port.any_name}_{i}"
            for i, dim in enumerate(port.partial_shape)
        )
        specs.append(replace(input_spec(port.any_name, port, shape, 0), pair=pairs.get(port.any_name)))
    tokens = next((spec for spec in specs if spec.name == "input_ids"), None)
    if tokens is None or tokens.shape != ("batch", "sequence"):
        raise IntegrityError(
            f"The decoder graph {path} accepts only prompts of certain lengths: "
            f"{f'its input_ids has the shape {tokens.shape}' if tokens else 'it has no input input_ids'}.",
            fix="export the model with multi_token_decode=True, or with `accel export MODEL OUT --backend openvino`.",
        )
    logits = next((port for port in model.outputs if "logits" in port.get_names()), None)
    if logits is None or (inside and BEAM_INDEX not in {port.any_name for port in model.inputs}):
        problem = (
            "has no output logits" if logits is None else f"stores a state, but has no input {BEAM_INDEX} for its rows"
        )
        raise IntegrityError(
            f"The decoder graph {path} {problem}.", fix="export the model again for the task text-generation."
        )
    words = logits.partial_shape[-1]
    vocabulary = next(
        (config[key] for key in ("decoder_vocab_size", "vocab_size") if isinstance(config.get(key), int)), None
    )
    if vocabulary is not None and words.is_static and words.get_length() != vocabulary:
        raise IntegrityError(
            f"The graph {path} returns logits for {words.get_length()} tokens, but the vocabulary in its config.json has "
            f"{vocabulary} tokens.",
            fix="copy the config.json of the exported model into the folder of the graph.",
        )
    size = words.get_length() if words.is_static else "vocabulary"
    limit = max_text_sizes(config).get("sequence")
    bounds = None if vocabulary is None else (0, vocabulary - 1)
    outputs = [TensorSpec("logits", dtype_word(logits.element_type), ("batch", "sequence", size))]
    outputs += [
        replace(spec, name=str(spec.pair), pair=spec.name, shape=(*spec.shape[:2], "total", *spec.shape[3:]))
        for spec in specs
        if spec.pair is not None
    ]
    return Component(
        name=name,
        file="",
        files=(),
        inputs=tuple(replace(spec, bounds=bounds) if spec.name == "input_ids" else spec for spec in specs),
        outputs=tuple(outputs),
        max_sizes={} if limit is None else {"total": limit},
        stateful=cached,
        continues="any" if cached else "none",
    )


def cache_pairs(model: ov.Model) -> dict[str, str]:
    """Return the KV cache inputs of a graph by name, each with the name of the output that contains its value for the
    next call.
    """
    outputs = {name for port in model.outputs for name in port.get_names()}
    pairs = {}
    for port in model.inputs:
        name = port.any_name
        present = name.replace("past_key_values", "present", 1).replace("past_", "present_", 1)
        if name.startswith("past") and present in outputs:
            pairs[name] = present
    return pairs


def _named_shape(port: ov.Output, model: ov.Model) -> tuple[int | str, ...]:
    """Return the shape of an input, with axis names derived from the input names of transformers models. OpenVINO does
    not name axes.
    """
    name, shape = port.any_name, port.partial_shape
    if name == "attention_mask" and "input_values" in _names(model.inputs):
        axes = _INPUT_AXES["input_values", 2][: len(shape)]
    elif name in _TEXT:
        axes = _TEXT_AXES.get(len(shape), ())
    else:
        axes = _INPUT_AXES.get((name, len(shape)), ("batch",))
    return tuple(
        dim.get_length() if dim.is_static else axes[i] if i < len(axes) else f"{name}_{i}"
        for i, dim in enumerate(shape)
    )


def _scheme(model: ov.Model) -> str | None:
    """Return the quantization scheme of a graph: `static-int8` if activations are quantized, `weight-int8` or
    `weight-int4` if only constants are stored in 8 or 4 bits, or `None`.
    """
    stored = set()
    for node in model.get_ops():
        if node.get_type_name() == "FakeQuantize":
            return "static-int8"
        if node.get_type_name() == "Convert" and node.get_output_element_type(0).is_real():
            constant = node.input_value(0)
            if constant.get_node().get_type_name() == "Constant":
                stored.add(str(constant.get_element_type().get_type_name()))
    if stored & {"i4", "u4", "nf4"}:
        return "weight-int4"
    return "weight-int8" if stored & {"i8", "u8"} else None


def _dtype(model: ov.Model) -> str:
    """Return the data type for computation, from the graph's precision hint.

    The weights can be stored in 16 bits even if the graph computes in float32.
    """
    if model.has_rt_info(["runtime_options", "INFERENCE_PRECISION_HINT"]):
        word = str(model.get_rt_info(["runtime_options", "INFERENCE_PRECISION_HINT"]).value)
        return {"f16": "float16", "bf16": "bfloat16"}.get(word, "float32")
    return "float32"


def _image_sizes(config: dict[str, Any]) -> dict[str, int]:
    """Return the height and width of the model's images from its config, or an empty mapping."""
    size = config.get("image_size", (config.get("vision_config") or {}).get("image_size"))
    pair = (size, size) if isinstance(size, int) else size
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(side, int) for side in pair):
        return {}
    return dict(zip(("height", "width"), pair, strict=True))
