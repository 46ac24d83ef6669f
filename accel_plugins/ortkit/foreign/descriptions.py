"""Other tools' own manifests: transformers' `export.json`, onnxruntime-genai's `genai_config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.artifact.checksums import check_file
from accel.artifact.reading import read_json
from accel.errors import ArtifactNotFoundError, IntegrityError
from accel.interfaces.folder_reader import Part
from accel.interfaces.task_registry import infer_task, read_config, text_decoder_task

from .file_names import EXPORT, GENAI, checked_file, descriptions_in

CONFIG = "config.json"
# transformers' names of the graphs of a decoder.
_PARTS: dict[str, Part] = {"model": "model", "prefill": "first", "decode": "following"}
_FORMATS = ("onnx", "openvino")
# Parts of a model of onnxruntime-genai's beside a decoder of text.
_OTHERS = ("encoder", "encoder_decoder_init", "vision", "speech", "embedding", "joiner")
GENERATION = "generation_config.json"
_SEARCH = (
    "do_sample", "max_length", "min_length", "no_repeat_ngram_size", "num_beams", "num_return_sequences", "repetition_penalty",
)  # fmt: skip
"""Settings of onnxruntime-genai's search that transformers calls the same (docs: "genai_config.json", version 0.18)."""
_SAMPLING = ("temperature", "top_k", "top_p")
_BEAMS = ("early_stopping", "length_penalty")
_NO_EFFECT = {"diversity_penalty": 0.0, "blank_penalty": 0.0}
"""Settings that accel has no counterpart of, with the value that switches them off."""
_RUNTIME = ("past_present_share_buffer", "random_seed", "chunk_size", "batch_size", *_NO_EFFECT)
"""How onnxruntime-genai runs a graph, not what it answers; a seed belongs to the caller here."""
_SIZES = ("head_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Description:
    """What a folder says of itself.

    Attributes:
        config: As in `config.json`.
        files: Its ONNX graphs by part, where a manifest names them.
        written: Files that transformers reads, for a folder that has none of its own.
    """

    config: dict[str, Any]
    files: dict[Part, str] = field(default_factory=dict)
    written: dict[str, dict[str, Any]] = field(default_factory=dict)

    def task(self, folder: Path) -> str:
        """The task, as far as it can be told."""
        if self.written:
            # A folder of onnxruntime-genai's that has a decoder alone.
            return text_decoder_task()
        return infer_task(self.config, folder)


def describe(folder: Path) -> Description:
    """The config of a folder, and what a manifest in it names.

    Raises:
        IntegrityError: A file is no regular file, a link that leaves the folder, or not JSON.
        ArtifactNotFoundError: It names graphs that are not there, or of kinds that nothing here reads.
    """
    present = {name for name in (CONFIG, EXPORT, GENAI) if (folder / name).exists()}
    for name in present:
        check_file(folder / name, folder, fix="copy the file itself into the folder.")
    config, described = read_config(folder), descriptions_in(folder)
    if EXPORT in described:
        return Description(config, _exported(folder))
    if GENAI in described:
        return _genai(folder, config)
    return Description(config)


def _exported(folder: Path) -> dict[Part, str]:
    values = read_json(folder / EXPORT)
    kind, components = str(values.get("export_format")), values.get("components")
    names = {
        str(name): str(entry.get("file")) for name, entry in (components.items() if isinstance(components, dict) else ())
        if isinstance(entry, dict)
    }  # fmt: skip
    if kind not in _FORMATS or not names or not set(names) <= set(_PARTS):
        raise ArtifactNotFoundError(
            f"{folder / EXPORT} names {sorted(names) or 'no graphs'} in the format {kind!r}; read are a model, or prefill and "
            f"decode, in {' or '.join(_FORMATS)}.",
            fix="export the model with accel: `accel export MODEL OUT`.",
        )
    if kind != "onnx":
        return {}
    return {_PARTS[name]: checked_file(folder, file) for name, file in names.items()}


def _genai(folder: Path, config: dict[str, Any]) -> Description:
    model = read_json(folder / GENAI).get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    others = [name for name in _OTHERS if isinstance(model, dict) and model.get(name)]
    file = decoder.get("filename") if isinstance(decoder, dict) else None
    if not isinstance(model, dict) or not isinstance(decoder, dict) or not isinstance(file, str) or others:
        have = f"is of a model with {', '.join(others)}" if others else "names no decoder's graph"
        raise ArtifactNotFoundError(
            f"{folder / GENAI} {have}; of onnxruntime-genai's folders those of decoders alone are read.",
            fix="run it with onnxruntime-genai, or export the original: `accel export MODEL OUT`.",
        )
    files: dict[Part, str] = {"model": checked_file(folder, file)}
    tokens = {key: model[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if model.get(key) is not None}
    generation = {GENERATION: {**tokens, **_search(folder)}} if not (folder / GENERATION).exists() else {}
    if config:
        return Description(config, files, generation)
    made = {
        "model_type": model.get("type"),
        "vocab_size": model.get("vocab_size"),
        "max_position_embeddings": model.get("context_length"),
        **tokens,
        **{{"head_size": "head_dim"}.get(key, key): decoder[key] for key in _SIZES if decoder.get(key) is not None},
    }
    made = {key: value for key, value in made.items() if value is not None}
    return Description(made, files, {CONFIG: made, **generation})


def _search(folder: Path) -> dict[str, Any]:
    """The settings of onnxruntime-genai's search in the words of transformers, as far as they have an effect.

    Raises:
        IntegrityError: A setting that has no counterpart here.
    """
    settings = {
        key: value for key, value in (read_json(folder / GENAI).get("search") or {}).items() if value is not None
    }
    unknown = sorted(settings.keys() - {*_SEARCH, *_SAMPLING, *_BEAMS, *_RUNTIME})
    unread = [name for name in _NO_EFFECT if settings.get(name, _NO_EFFECT[name]) != _NO_EFFECT[name]]
    if unknown or unread:
        name = (unknown or unread)[0]
        raise IntegrityError(
            f"{folder / GENAI} sets {name!r} to {settings[name]!r} for its search, which accel does not do.",
            fix=f"remove it, or write the model's settings into {GENERATION}, which goes before.",
        )
    kept = {
        *_SEARCH,
        *(_SAMPLING if settings.get("do_sample") else ()),
        *(_BEAMS if settings.get("num_beams", 1) > 1 else ()),
    }
    return {name: value for name, value in settings.items() if name in kept}
