"""Conversion of the graphs of generative models to components of an artifact: a decoder, with or without an encoder."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from accel.artifact.atomic_folder_writing import copy_companions, discard, is_companion, staging, tool_versions
from accel.artifact.checksums import stamp_files
from accel.artifact.home_folder import accel_home
from accel.artifact.manifest import MANIFEST, Artifact, Component, Manifest, with_files
from accel.artifact.tensor_specs import TensorSpec
from accel.errors import AccelError, ArtifactNotFoundError, IntegrityError, OutputFolderError, TaskError
from accel.interfaces.folder_reader import Part
from accel.interfaces.task_spec import TaskSpec

from ..graph.editing import add_initializer, operator_domains, save_graphs
from . import graph_merge
from .file_names import several_graphs
from .foreign_manifests import Description
from .left_padding_bias import CAPACITY, counting_nodes, with_mask
from .onnx_file import OnnxFile, dimensions, dtype_word, fixed_axes, given_inputs, manifest_of, read_onnx

logger = logging.getLogger(__name__)

_FORM = 5
"""Version of the converted graphs under `ACCEL_HOME`; increased with each change, so that folders are converted again."""
_LOGITS = "num_logits_to_keep"
_SEQUENCES = ("input_ids", "decoder_input_ids", "position_ids", "inputs_embeds")
_KNOWN = {
    "input_ids": ("batch", "sequence"),
    "position_ids": ("batch", "sequence"),
    "inputs_embeds": ("batch", "sequence", None),
    "encoder_attention_mask": ("batch", "encoder_sequence"),
    graph_merge.HIDDEN: ("batch", "encoder_sequence", None),
    "logits": ("batch", "sequence", None),
}
_ENCODERS: Mapping[str, tuple[str | None, ...]] = {
    "input_ids": ("batch", "sequence"),
    "attention_mask": ("batch", "sequence"),
    "input_features": ("batch", None, None),
    "pixel_values": ("batch", None, None, None),
    "last_hidden_state": ("batch", "sequence", None),
}
_HEADS = ("num_key_value_heads", "num_attention_heads", "n_head", "decoder_attention_heads", "num_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers", *_LAYERS)


def adopt_decoders(
    folder: Path,
    candidates: list[str],
    spec: TaskSpec,
    description: Description,
    *,
    file_name: str | None,
    variant: str | None,
) -> Artifact:
    """Return an artifact for a folder with the graphs of a generative model; see `OnnxFolderReader.adopt`.

    Raises:
        ArtifactNotFoundError: A graph is missing.
        IntegrityError: A graph cannot be read, or does not match the config or the other graphs.
        TaskError: The task needs a different kind of model than these graphs (with or without an encoder).
    """
    config = description.config
    encoder = bool(config.get("is_encoder_decoder", spec.encoder_decoder)) or bool(spec.encoder_decoder)
    if encoder is not (spec.encoder_decoder is not False):
        raise TaskError(
            f"config.json in {folder} describes a model with an encoder; models for the task {spec.name} have no encoder.",
            fix="pass another task=..., such as task='text2text-generation', or load the model with another class.",
        )
    manifest_files = description.files if file_name is None and variant is None else {}
    files = manifest_files or several_graphs(folder, candidates, file_name, variant, encoder=encoder)
    if encoder and "encoder" not in files:
        raise ArtifactNotFoundError(
            f"The model has an encoder, but {folder} has no graph of the encoder; its graphs are: {', '.join(files.values())}.",
            fix="export the model with accel: `accel export MODEL OUT`.",
        )
    onnx_files: dict[Part, OnnxFile] = {part: read_onnx(folder, file) for part, file in files.items()}
    if "first" in onnx_files and graph_merge.BRANCH in onnx_files["first"].input_names:
        # Some exporters give a merged graph (with the input `use_cache_branch`) the file name of the graph for prompts.
        onnx_files = {
            ("merged" if part == "first" else part): graph for part, graph in onnx_files.items() if part != "following"
        }
    settings = _Settings.of(config, encoder=encoder)
    if encoder:
        graphs, continues = _encoder_decoder(folder, onnx_files)
    else:
        graphs, continues = _decoder_alone(folder, onnx_files)
    components = [
        _component(name, graph, settings, folder, continues=continues if name in ("model", "decoder") else "any")
        for name, graph in graphs.items()
    ]
    manifest = manifest_of(spec.name, config, folder, [graph.model for graph in onnx_files.values()])
    if not description.written and all(
        any(graph is original for original in onnx_files.values()) for graph in graphs.values()
    ):
        # accel changed no graph, so the artifact refers to the original files and copies nothing.
        components_with_files = tuple(
            replace(component, file=graph.name, files=stamp_files(folder, graph.files))
            for component, graph in zip(components, graphs.values(), strict=True)
        )
        return Artifact(folder.absolute(), replace(manifest, components=components_with_files))
    return _stored_conversion(folder, manifest, components, graphs, [*onnx_files.values()], description.written)


def _decoder_alone(folder: Path, read: Mapping[Part, OnnxFile]) -> tuple[dict[str, OnnxFile], Continues]:
    read = {part: replace(file, model=_with_all_logits(file.model)) for part, file in read.items()}
    # Newer folders of transformers.js call a graph "merged" even if it has no branches.
    plain = "merged" in read and graph_merge.BRANCH not in read["merged"].input_names
    if "model" in read or set(read) == {"first"} or plain:
        file = read.get("model") or read["merged" if plain else "first"]
        if graph_merge.BRANCH in file.input_names:
            return {"model": _merged(folder, *_branches(folder, file))}, "one"
        if not any(map(graph_merge.our_name, file.input_names)):
            return {"model": file}, "none"
        if counting_nodes(file.model):
            model = with_mask(graph_merge.with_our_names(file.model), folder / file.name)
            return {"model": replace(file, model=model)}, "any"
        return {"model": file}, "any"
    pair = _branches(folder, read["merged"]) if "merged" in read else (read["first"], read["following"])
    # transformers' exporter writes two kinds of graphs for a prompt that was already processed: graphs that accept one
    # new token, and graphs that accept several new tokens. Only graphs for several tokens have a named token axis.
    tokens = next((value for value in pair[1].model.graph.inputs if value.name == "input_ids"), None)
    several = tokens is not None and isinstance(dimensions(tokens)[1], str)
    free = several and any("past_key_values.layers" in name for name in pair[1].input_names)
    return {"model": _merged(folder, *pair)}, "any" if free else "one"


def _with_all_logits(model: ir.Model) -> ir.Model:
    """Return a graph that computes the logits of all tokens, without transformers.js' input `num_logits_to_keep`.

    A graph without this input is returned unchanged. The value 0 of the input means all tokens.
    """
    if not any(value.name == _LOGITS for value in model.graph.inputs):
        return model
    copy = model.clone()
    number = next(value for value in copy.graph.inputs if value.name == _LOGITS)
    copy.graph.inputs.remove(number)
    number.replace_all_uses_with(add_initializer(copy.graph, "all_logits", np.array(0, np.int64)))
    return copy


def _encoder_decoder(folder: Path, read: Mapping[Part, OnnxFile]) -> tuple[dict[str, OnnxFile], Continues]:
    encoder = read["encoder"]
    if set(read) == {"encoder", "first"}:
        return {"encoder": encoder, "decoder": read["first"]}, "none"
    pair = _branches(folder, read["merged"]) if "merged" in read else (read["first"], read["following"])
    prompt, following = (replace(file, model=graph_merge.with_our_names(file.model)) for file in pair)
    cross = replace(prompt, model=graph_merge.cross_attention(prompt.model, folder / prompt.name))
    cut = replace(prompt, model=graph_merge.with_cross_inputs(prompt.model))
    outputs = {value.name for value in cut.model.graph.outputs}
    graph_merge.keep_outputs(following.model, lambda name: name in outputs)
    return {"encoder": encoder, "cross_attention": cross, "decoder": _merged(folder, cut, following)}, "one"


def _branches(folder: Path, file: OnnxFile) -> tuple[OnnxFile, OnnxFile]:
    prompt, following = graph_merge.branches(file.model, folder / file.name)
    return replace(file, model=prompt), replace(file, model=following)


def _merged(folder: Path, prompt: OnnxFile, following: OnnxFile) -> OnnxFile:
    """Merge the graph for prompts and the graph for later tokens under an `If` node, with accel's input and output names."""
    prompt_model, following_model = (graph_merge.with_our_names(file.model) for file in (prompt, following))
    past_names = [
        str(value.name) for value in following_model.graph.inputs if str(value.name).startswith("past_key_values.")
    ]
    if not past_names:
        raise IntegrityError(
            f"{folder / following.name} has no inputs for the keys and values of earlier tokens (the KV cache).",
            fix="export the model again with its KV cache: `accel export MODEL OUT`.",
        )
    return replace(prompt, model=graph_merge.merged(prompt_model, following_model, past_names[0]))


# The following functions describe the inputs and outputs of a component.

Continues = Literal["any", "one", "none"]


@dataclass(frozen=True, slots=True)
class _Settings:
    """Decoder settings read from a config; `None` where the config has no value."""

    pad: int
    heads: int | None
    head_size: int | None
    layers: int | None
    vocabulary: int | None
    positions: int | None
    fixed: Mapping[str, int]

    @classmethod
    def of(cls, config: Mapping[str, Any], *, encoder: bool) -> _Settings:
        """Read the settings from the `decoder` or `text_config` section of a config, or from the config without these sections."""
        inner = next((config[key] for key in ("decoder", "text_config") if isinstance(config.get(key), dict)), config)

        def number(*names: str, among: Mapping[str, Any] = inner) -> int | None:
            values = (among.get(name) for name in names)
            return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)

        limit = number("max_position_embeddings", "max_target_positions", "n_positions")
        rotary = bool({"rope_theta", "rope_parameters", "rotary_dim"} & set(inner)) or inner.get("alibi")
        width, every = number("hidden_size", "n_embd", "d_model"), number("num_attention_heads", "n_head")
        return cls(
            pad=max(number("pad_token_id", among=config) or 0, 0),
            heads=number(*_HEADS),
            head_size=number("head_dim", "d_kv") or (width // every if width and every else None),
            layers=number(*(_DECODER_LAYERS if encoder else _LAYERS)),
            vocabulary=number("decoder_vocab_size", "vocab_size"),
            positions=None if rotary else limit,
            fixed=fixed_axes(config),
        )


def _component(name: str, file: OnnxFile, settings: _Settings, folder: Path, *, continues: Continues) -> Component:
    """Return the component of a graph: its inputs and outputs with accel's axis names.

    Raises:
        IntegrityError: The graph has an input that accel does not provide, or does not match the config.
    """
    where, domains = folder / file.name, operator_domains(file.model)
    inputs, outputs = given_inputs(file.model.graph), list(file.model.graph.outputs)
    if name in ("encoder", "cross_attention"):
        axis_names = _ENCODERS if name == "encoder" else _CROSS
        takes = tuple(_spec(value, axis_names, settings) for value in inputs)
        returns = tuple(_spec(value, axis_names, settings) for value in outputs if _returned(name, str(value.name)))
        return Component(name=name, file="", files=(), inputs=takes, outputs=returns, domains=domains)
    cached = continues != "none"
    pairs = _pairs([str(v.name) for v in inputs], [str(v.name) for v in outputs], where) if cached else {}
    decoder_axes = {**_KNOWN, "attention_mask": ("batch", "total" if cached else "sequence")}
    names = {*decoder_axes, *pairs, "logits_to_keep"}
    unknown_names = [v.name for v in inputs if v.name not in names and not str(v.name).startswith("cross.")]
    if unknown_names:
        raise IntegrityError(
            f"The decoder graph {where} has the inputs {unknown_names}, for which accel has no values.",
            fix="export the model again: `accel export MODEL OUT`.",
        )
    input_specs = [_spec(value, decoder_axes, settings, pairs) for value in inputs]
    output_specs = [
        _spec(value, decoder_axes, settings, {v: k for k, v in pairs.items()}, output=True)
        for value in outputs
        if value.name == "logits" or value.name in pairs.values()
    ]
    _check(input_specs, output_specs, settings, where, continues)
    return Component(
        name=name,
        file="",
        files=(),
        inputs=tuple(input_specs),
        outputs=tuple(output_specs),
        max_sizes={} if settings.positions is None else {"total": settings.positions},
        stateful=cached,
        continues=continues,
        domains=domains,
    )


_CROSS: Mapping[str, tuple[str | None, ...]] = {graph_merge.HIDDEN: ("batch", "encoder_sequence", None)}


def _returned(component: str, name: str) -> bool:
    return name == "last_hidden_state" if component == "encoder" else name.startswith("cross.")


def _pairs(inputs: list[str], outputs: list[str], where: Path) -> dict[str, str]:
    """Return a map from each past input of the KV cache to the present output of the same layer, by name."""
    presents = {own_name: name for name in outputs if (own_name := graph_merge.our_name(name, output=True)) is not None}
    pairs = {}
    for name in inputs:
        own_name = graph_merge.our_name(name)
        if own_name is None or not own_name.startswith("past_key_values."):
            continue
        present = presents.get(own_name.replace("past_key_values", "present", 1))
        if present is None:
            raise IntegrityError(
                f"{where} has the cache input {name!r}, but no output with the new keys and values for it.",
                fix="export the model again with its KV cache: `accel export MODEL OUT`.",
            )
        pairs[name] = present
    return pairs


def _spec(
    value: ir.Value,
    known_axes: Mapping[str, tuple[str | None, ...]],
    settings: _Settings,
    pairs: Mapping[str, str] | None = None,
    *,
    output: bool = False,
) -> TensorSpec:
    sizes = tuple(settings.fixed.get(size, size) if isinstance(size, str) else size for size in dimensions(value))
    name = str(value.name)
    axes: tuple[str | None, ...] = known_axes.get(name, ("batch", *(None for _ in sizes[1:])))
    accel_name = graph_merge.our_name(name, output=output) or name
    pair = (pairs or {}).get(name)
    if pair is not None:
        # The axis name `CAPACITY` means that past and present are one buffer with space for more tokens.
        is_buffer = sizes[2] == CAPACITY
        axes = (
            "batch",
            None,
            CAPACITY if is_buffer else "past" if accel_name.startswith("past_key_values.") else "total",
            None,
        )
    elif accel_name.startswith("cross."):
        axes = ("batch", None, "encoder_sequence", None)
    if len(axes) != len(sizes):
        raise IntegrityError(
            f"The tensor {name!r} of the decoder graph has {len(sizes)} axes {sizes}; accel supports only {len(axes)} axes for it.",
            fix="export the model again: `accel export MODEL OUT`.",
        )
    shape = tuple(
        axis if axis is not None and isinstance(size, str) else size for axis, size in zip(axes, sizes, strict=True)
    )
    if pair is not None or accel_name.startswith("cross."):
        # Some files have names instead of numbers for these two axes; the config contains the numbers.
        heads, size = (
            configured if isinstance(declared, str) and configured is not None else declared
            for declared, configured in ((shape[1], settings.heads), (shape[3], settings.head_size))
        )
        shape = (shape[0], heads, shape[2], size)
    bounded = name == "input_ids" and settings.vocabulary is not None
    return TensorSpec(
        name,
        dtype_word(value),
        shape,
        role="cache" if pair is not None else "mask" if name == "attention_mask" else "data",
        pad_value=settings.pad if name == "input_ids" else 0,
        pair=pair,
        bounds=(0, (settings.vocabulary or 1) - 1) if bounded else None,
    )


def _check(
    inputs: list[TensorSpec], outputs: list[TensorSpec], settings: _Settings, where: Path, continues: Continues
) -> None:
    """Check a decoder against its config.

    Raises:
        IntegrityError: The graph belongs to another model, or does not accept a prompt.
    """
    logits = next((spec for spec in outputs if spec.name == "logits"), None)
    if logits is None:
        raise IntegrityError(
            f"The decoder graph {where} has no output 'logits'; its outputs are {[spec.name for spec in outputs]}.",
            fix="export the model again: `accel export MODEL OUT --task text-generation`, or another task that generates.",
        )
    vocabulary = logits.shape[-1]
    if settings.vocabulary is not None and isinstance(vocabulary, int) and vocabulary != settings.vocabulary:
        raise IntegrityError(
            f"{where} returns logits for a vocabulary of {vocabulary} tokens, but vocab_size in its config.json is {settings.vocabulary}.",
            fix="copy the config.json of the exported model into the folder of the graph.",
        )
    layers = sum(spec.pair is not None for spec in inputs) // 2
    if continues != "none" and settings.layers is not None and layers != settings.layers:
        raise IntegrityError(
            f"{where} has a KV cache for {layers} layers, but its config.json declares {settings.layers} layers.",
            fix="copy the config.json of the exported model into the folder of the graph.",
        )
    tokens = next((spec for spec in inputs if spec.name in ("input_ids", "inputs_embeds")), None)
    wrong_caches = [spec.name for spec in inputs if spec.pair is not None and not all(map(_free, spec.shape, range(4)))]
    if tokens is None or tokens.shape[:2] != ("batch", "sequence") or wrong_caches:
        shapes = {spec.name: spec.shape for spec in inputs if spec is tokens or spec.name in wrong_caches[:1]}
        raise IntegrityError(
            f"{where} does not accept prompts of variable length; the shapes of its inputs are {shapes}.",
            fix="copy the graph for prompts (decoder_model.onnx) into the folder, or export the model again: `accel export MODEL OUT`.",
        )


def _free(size: int | str, axis: int) -> bool:
    """Return whether the size of a KV cache axis is of the right kind.

    The axes of rows and tokens must have a variable size; the axes of heads and of the head size must have a number.
    """
    return isinstance(size, str) is (axis in (0, 2))


# The following function stores converted graphs.


def _stored_conversion(
    folder: Path,
    manifest: Manifest,
    components: list[Component],
    graphs: Mapping[str, OnnxFile],
    read: list[OnnxFile],
    written: Mapping[str, dict[str, Any]],
) -> Artifact:
    """Store the converted graphs under `ACCEL_HOME`, or load the graphs that an earlier call stored for the same files."""
    names = [file for graph in read for file in graph.files]
    names += [path.name for path in sorted(folder.iterdir()) if is_companion(path)]
    key = {
        "folder": str(folder.absolute()),
        "files": [(record.name, record.bytes, record.sha256) for record in stamp_files(folder, names)],
        "task": manifest.task,
        "written": written,
        "form": [_FORM, tool_versions()["accel"]],
    }
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    out = accel_home() / "exports" / f"{folder.name.replace(' ', '_')[:60] or 'model'}-{digest}"
    if (out / MANIFEST).is_file():
        try:
            return Artifact.load(out)
        except AccelError as error:
            logger.warning(
                "%s The stored conversion is discarded, and the model in %s is converted again.", error.message, folder
            )
    discard(out)
    named_components = [replace(component, file=f"{component.name}.onnx") for component in components]
    try:
        with staging(out) as temporary:
            copy_companions(folder, temporary)
            for name, values in written.items():
                (temporary / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            models = {c.file: graph.model for c, graph in zip(named_components, graphs.values(), strict=True)}
            weights = save_graphs(models, temporary)
            components_with_files = with_files(
                temporary, named_components, [[c.file, *weights] for c in named_components]
            )
            artifact = Artifact.create(temporary, replace(manifest, components=components_with_files))
    except OutputFolderError as error:
        if (out / MANIFEST).is_file():
            return Artifact.load(out)
        raise OutputFolderError(
            f"The converted graphs of {folder} cannot be written: {error.message}",
            fix="set the environment variable ACCEL_HOME to a folder that is writable and has enough free space.",
        ) from error
    logger.info("converted the graphs of %s to the form that accel runs, stored in %s", folder, out)
    return Artifact(out, artifact.manifest)
