"""Graphs of models that generate, as components in our form: a decoder, behind an encoder or alone."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accel.artifact.home import accel_home
from accel.artifact.manifest import MANIFEST, Artifact, Component, Manifest, Origin, with_files
from accel.artifact.tensors import TensorSpec
from accel.artifact.writing import copy_companions, discard, is_companion, staging, tool_versions
from accel.errors import AccelError, ArtifactNotFoundError, IntegrityError, OutputFolderError, TaskError
from accel.interfaces.folder_reader import Part
from accel.interfaces.task_spec import TaskSpec

from . import surgery
from .attention import CAPACITY, grouped, with_mask
from .descriptions import Description
from .files import several_graphs
from .reading import (
    dimensions,
    dtype_word,
    external_files,
    fixed_axes,
    operator_domains,
    opset,
    precision,
    read_onnx,
    stamp,
)
from .weights import write_graphs

if TYPE_CHECKING:
    import onnx

logger = logging.getLogger(__name__)

_FORM = 3
"""Counts changes of what is kept under `ACCEL_HOME` for a folder."""
_SEQUENCES = ("input_ids", "decoder_input_ids", "position_ids", "inputs_embeds")
_KNOWN = {
    "input_ids": ("batch", "sequence"),
    "position_ids": ("batch", "sequence"),
    "inputs_embeds": ("batch", "sequence", None),
    "encoder_attention_mask": ("batch", "encoder_sequence"),
    surgery.HIDDEN: ("batch", "encoder_sequence", None),
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


@dataclass(slots=True)
class _Read:
    """One file of a folder."""

    file: str
    model: onnx.ModelProto
    beside: list[str]
    folder: Path


def adopt_decoders(
    folder: Path,
    candidates: list[str],
    spec: TaskSpec,
    description: Description,
    *,
    file_name: str | None,
    variant: str | None,
) -> Artifact:
    """An artifact for a folder with the graphs of a model that generates; see `OnnxFolderReader.adopt`.

    Raises:
        ArtifactNotFoundError: A graph is missing.
        IntegrityError: A graph cannot be read, or does not fit the config or the others.
        TaskError: The graphs are of another kind of model than the task's.
    """
    config = description.config
    encoder = bool(config.get("is_encoder_decoder", spec.encoder_decoder)) or bool(spec.encoder_decoder)
    if encoder is not (spec.encoder_decoder is not False):
        raise TaskError(
            f"The config of {folder} is of a model with an encoder, which models for {spec.name} have not.",
            fix="pass another task=..., or use another class.",
        )
    named = description.files if file_name is None and variant is None else {}
    files = named or several_graphs(folder, candidates, file_name, variant, encoder=encoder)
    if encoder and "encoder" not in files:
        raise ArtifactNotFoundError(
            f"{folder} names no encoder's graph beside {', '.join(files.values())}.",
            fix="export the model with accel: `accel export MODEL OUT`.",
        )
    read: dict[Part, _Read] = {}
    for part, file in files.items():
        model = read_onnx(folder, file)
        read[part] = _Read(file, model, external_files(model, folder, file), (folder / file).parent)
    if "first" in read and any(value.name == surgery.BRANCH for value in read["first"].model.graph.input):
        # Both branches under the name of one: `decoder.onnx`.
        read = {("merged" if part == "first" else part): one for part, one in read.items() if part != "following"}
    settings = _Settings.of(config, encoder=encoder)
    if encoder:
        graphs, continues = _encoder_decoder(folder, read)
    else:
        graphs, continues = _decoder_alone(folder, read)
    components = [
        _component(name, one, settings, folder, continues=continues if name in ("model", "decoder") else "any")
        for name, one in graphs.items()
    ]
    models = [one.model for one in read.values()]
    dtype, quantization = precision(models)
    manifest = Manifest(
        format="onnx",
        task=spec.name,
        architecture=str((config.get("architectures") or [""])[0]),
        dtype=dtype,
        opset=opset(models[-1]),
        source=Origin(id=str(folder)),
        quantization=quantization,
    )
    if not description.written and all(any(one is other for other in read.values()) for one in graphs.values()):
        # Nothing was changed: the files stay where they are.
        placed = tuple(
            replace(component, file=one.file, files=tuple(stamp(folder, file) for file in (one.file, *one.beside)))
            for component, one in zip(components, graphs.values(), strict=True)
        )
        return Artifact(folder.absolute(), replace(manifest, components=placed))
    return _kept(folder, manifest, components, graphs, [*read.values()], description.written)


def _decoder_alone(folder: Path, read: Mapping[Part, _Read]) -> tuple[dict[str, _Read], Continues]:
    # Newer folders of transformers.js call a graph without branches merged, too.
    plain = "merged" in read and all(value.name != surgery.BRANCH for value in read["merged"].model.graph.input)
    if "model" in read or set(read) == {"first"} or plain:
        one = read.get("model") or read["merged" if plain else "first"]
        inputs = {value.name for value in one.model.graph.input}
        if surgery.BRANCH in inputs:
            return {"model": _joined(folder, *_branches(folder, one))}, "one"
        if not any(map(surgery.our_name, inputs)):
            return {"model": one}, "none"
        if grouped(one.model):
            return {"model": replace(one, model=with_mask(surgery.in_our_words(one.model), folder / one.file))}, "any"
        return {"model": one}, "any"
    pair = _branches(folder, read["merged"]) if "merged" in read else (read["first"], read["following"])
    # transformers' exporter makes both kinds of graphs behind a past, and says which by the axis of the tokens.
    free = "past_key_values.layers" in str([v.name for v in pair[1].model.graph.input]) and _takes_several(
        pair[1].model
    )
    return {"model": _joined(folder, *pair)}, "any" if free else "one"


def _takes_several(model: onnx.ModelProto) -> bool:
    tokens = next((value for value in model.graph.input if value.name == "input_ids"), None)
    return tokens is not None and isinstance(dimensions(tokens)[1], str)


def _encoder_decoder(folder: Path, read: Mapping[Part, _Read]) -> tuple[dict[str, _Read], Continues]:
    encoder = read["encoder"]
    if set(read) == {"encoder", "first"}:
        return {"encoder": encoder, "decoder": read["first"]}, "none"
    pair = _branches(folder, read["merged"]) if "merged" in read else (read["first"], read["following"])
    prompt, following = (replace(one, model=surgery.in_our_words(one.model)) for one in pair)
    where = folder / prompt.file
    cross = surgery.cross_attention(prompt.model, where)
    cut = replace(prompt, model=surgery.with_cross_inputs(prompt.model))
    kept = {value.name for value in cut.model.graph.output}
    behind = replace(following, model=surgery.only(following.model, lambda name: name in kept))
    return {
        "encoder": encoder,
        "cross_attention": replace(prompt, model=cross),
        "decoder": _joined(folder, cut, behind),
    }, "one"


def _branches(folder: Path, one: _Read) -> tuple[_Read, _Read]:
    prompt, following = surgery.branches(one.model, folder / one.file)
    return replace(one, model=prompt), replace(one, model=following)


def _joined(folder: Path, prompt: _Read, following: _Read) -> _Read:
    """Both under an `If`, in our words."""
    models = [surgery.in_our_words(one.model) for one in (prompt, following)]
    pasts = [value.name for value in models[1].graph.input if value.name.startswith("past_key_values.")]
    if not pasts:
        raise IntegrityError(
            f"{folder / following.file} reads no past keys and values.", fix="export the model again, with its cache."
        )
    model = surgery.joined(models[0], models[1], (prompt.folder, following.folder), pasts[0])
    return replace(prompt, model=model)


# What goes in and out

Continues = Literal["any", "one", "none"]


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a config says of a decoder; `None` where it says nothing."""

    pad: int
    heads: int | None
    head_size: int | None
    layers: int | None
    vocabulary: int | None
    positions: int | None
    fixed: Mapping[str, int]

    @classmethod
    def of(cls, config: Mapping[str, Any], *, encoder: bool) -> _Settings:
        """Of the decoder's own config, where there are two in one."""
        inner = next((config[key] for key in ("decoder", "text_config") if isinstance(config.get(key), dict)), config)

        def number(*names: str, among: Mapping[str, Any] = inner) -> int | None:
            found = (among.get(name) for name in names)
            return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)

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


def _component(name: str, read: _Read, settings: _Settings, folder: Path, *, continues: Continues) -> Component:
    """What a graph takes and returns, in our axes.

    Raises:
        IntegrityError: It takes what no model here is given, or does not fit the config.
    """
    graph, where = read.model.graph, folder / read.file
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in stored]
    if name in ("encoder", "cross_attention"):
        known = _ENCODERS if name == "encoder" else _CROSS
        return Component(
            name=name,
            file="",
            files=(),
            inputs=tuple(_spec(value, known, settings) for value in inputs),
            outputs=tuple(_spec(value, known, settings) for value in graph.output if _returned(name, value.name)),
            domains=operator_domains(read.model),
        )
    cached = continues != "none"
    pairs = _pairs([v.name for v in inputs], [v.name for v in graph.output], where) if cached else {}
    whole = {**_KNOWN, "attention_mask": ("batch", "total" if cached else "sequence")}
    takes = {*whole, *pairs, "logits_to_keep", "num_logits_to_keep"}
    odd = [v.name for v in inputs if v.name not in takes and not v.name.startswith("cross.")]
    if odd:
        raise IntegrityError(
            f"{where} takes {odd}, which a decoder here is not given.",
            fix="export the model again: `accel export MODEL OUT`.",
        )
    made = [_spec(value, whole, settings, pairs) for value in inputs]
    outputs = [
        _spec(value, whole, settings, {v: k for k, v in pairs.items()}, output=True)
        for value in graph.output
        if value.name == "logits" or value.name in pairs.values()
    ]
    _check(made, outputs, settings, where, continues)
    return Component(
        name=name,
        file="",
        files=(),
        inputs=tuple(made),
        outputs=tuple(outputs),
        max_sizes={} if settings.positions is None else {"total": settings.positions},
        stateful=cached,
        continues=continues,
        domains=operator_domains(read.model),
    )


_CROSS: Mapping[str, tuple[str | None, ...]] = {surgery.HIDDEN: ("batch", "encoder_sequence", None)}


def _returned(component: str, name: str) -> bool:
    return name == "last_hidden_state" if component == "encoder" else name.startswith("cross.")


def _pairs(inputs: list[str], outputs: list[str], where: Path) -> dict[str, str]:
    """The output that each input of the cache comes from."""
    ours = {our: name for name in outputs if (our := surgery.our_name(name, output=True)) is not None}
    pairs = {}
    for name in inputs:
        our = surgery.our_name(name)
        if our is None or not our.startswith("past_key_values."):
            continue
        present = ours.get(our.replace("past_key_values", "present", 1))
        if present is None:
            raise IntegrityError(
                f"{where} takes {name!r} and returns nothing for it.", fix="export the model again, with its cache."
            )
        pairs[name] = present
    return pairs


def _spec(
    value: onnx.ValueInfoProto,
    known: Mapping[str, tuple[str | None, ...]],
    settings: _Settings,
    pairs: Mapping[str, str] | None = None,
    *,
    output: bool = False,
) -> TensorSpec:
    sizes = tuple(settings.fixed.get(size, size) if isinstance(size, str) else size for size in dimensions(value))
    axes: tuple[str | None, ...] = known.get(value.name, ("batch", *(None for _ in sizes[1:])))
    our = surgery.our_name(value.name, output=output) or value.name
    pair = (pairs or {}).get(value.name)
    if pair is not None:
        # One name for both is one buffer with room for more tokens.
        one = sizes[2] == CAPACITY
        axes = ("batch", None, CAPACITY if one else "past" if our.startswith("past_key_values.") else "total", None)
    elif our.startswith("cross."):
        axes = ("batch", None, "encoder_sequence", None)
    if len(axes) != len(sizes):
        raise IntegrityError(
            f"{value.name!r} has {len(sizes)} axes, {sizes}; a decoder here has {len(axes)} for it.",
            fix="export the model again: `accel export MODEL OUT`.",
        )
    shape = tuple(
        axis if axis is not None and isinstance(size, str) else size for axis, size in zip(axes, sizes, strict=True)
    )
    if pair is not None or our.startswith("cross."):
        # Files that name these axes, too, leave their sizes to the config.
        heads, size = (
            given if isinstance(found, str) and given is not None else found
            for found, given in ((shape[1], settings.heads), (shape[3], settings.head_size))
        )
        shape = (shape[0], heads, shape[2], size)
    bounded = value.name == "input_ids" and settings.vocabulary is not None
    return TensorSpec(
        value.name,
        dtype_word(value.type.tensor_type.elem_type),
        shape,
        role="cache" if pair is not None else "mask" if value.name == "attention_mask" else "data",
        pad_value=settings.pad if value.name == "input_ids" else 0,
        pair=pair,
        bounds=(0, (settings.vocabulary or 1) - 1) if bounded else None,
    )


def _check(
    inputs: list[TensorSpec], outputs: list[TensorSpec], settings: _Settings, where: Path, continues: Continues
) -> None:
    """Hold a decoder against its config.

    Raises:
        IntegrityError: It is another model's, or cannot be given a prompt.
    """
    logits = next((spec for spec in outputs if spec.name == "logits"), None)
    if logits is None:
        raise IntegrityError(f"{where} returns no logits.", fix="export the model for generation.")
    words = logits.shape[-1]
    if settings.vocabulary is not None and isinstance(words, int) and words != settings.vocabulary:
        raise IntegrityError(
            f"{where} returns logits of {words} tokens; its config.json names {settings.vocabulary}.",
            fix="copy the config.json of the model that was exported beside it.",
        )
    layers = sum(spec.pair is not None for spec in inputs) // 2
    if continues != "none" and settings.layers is not None and layers != settings.layers:
        raise IntegrityError(
            f"{where} keeps keys and values of {layers} layers; its config.json names {settings.layers}.",
            fix="copy the config.json of the model that was exported beside it.",
        )
    tokens = next((spec for spec in inputs if spec.name in ("input_ids", "inputs_embeds")), None)
    fixed = [spec.name for spec in inputs if spec.pair is not None and not all(map(_free, spec.shape, range(4)))]
    if tokens is None or tokens.shape[:2] != ("batch", "sequence") or fixed:
        shapes = {spec.name: spec.shape for spec in inputs if spec is tokens or spec.name in fixed[:1]}
        raise IntegrityError(
            f"{where} does not take prompts of any length: {shapes}.",
            fix="add the graph that reads the prompt (decoder_model.onnx), or export the model again.",
        )


def _free(size: int | str, axis: int) -> bool:
    """Rows and tokens vary, heads and their sizes do not."""
    return isinstance(size, str) is (axis in (0, 2))


# What was brought to our form


def _kept(
    folder: Path,
    manifest: Manifest,
    components: list[Component],
    graphs: Mapping[str, _Read],
    read: list[_Read],
    written: Mapping[str, dict[str, Any]],
) -> Artifact:
    """The graphs in our form under `ACCEL_HOME`, or those kept there before for the same files."""
    names = [file for one in read for file in (one.file, *one.beside)]
    names += [path.name for path in sorted(folder.iterdir()) if is_companion(path)]
    key = {
        "folder": str(folder.absolute()),
        "files": [(record.name, record.bytes, record.sha256) for record in (stamp(folder, name) for name in names)],
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
            logger.warning("%s Reading %s again.", error.message, folder)
    discard(out)
    placed = [replace(component, file=f"{component.name}.onnx") for component in components]
    try:
        with staging(out) as temporary:
            copy_companions(folder, temporary)
            for name, values in written.items():
                (temporary / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            beside = write_graphs(
                {c.file: (one.model, one.folder) for c, one in zip(placed, graphs.values(), strict=True)}, temporary
            )
            recorded = with_files(temporary, placed, [[c.file, *beside[c.file]] for c in placed])
            artifact = Artifact.create(temporary, replace(manifest, components=recorded))
    except OutputFolderError as error:
        if (out / MANIFEST).is_file():
            return Artifact.load(out)
        raise OutputFolderError(
            f"The graphs of {folder} cannot be kept: {error.message}",
            fix="set ACCEL_HOME to a folder that can be written and has room.",
        ) from error
    logger.info("brought the graphs of %s to one form, kept in %s", folder, out)
    return Artifact(out, artifact.manifest)
