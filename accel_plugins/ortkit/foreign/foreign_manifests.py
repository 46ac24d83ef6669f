"""Manifests that other tools write: transformers' `export.json` and onnxruntime-genai's `genai_config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.artifact.checksums import check_file
from accel.artifact.json_reading import read_json
from accel.errors import ArtifactNotFoundError, IntegrityError
from accel.interfaces.folder_reader import Part
from accel.interfaces.task_registry import infer_task, read_config, text_decoder_task

from .file_names import EXPORT, GENAI, checked_file, descriptions_in

CONFIG = "config.json"
# transformers' names for the graphs of a decoder.
_PARTS: dict[str, Part] = {"model": "model", "prefill": "first", "decode": "following"}
_FORMATS = ("onnx", "openvino")
# Keys in `genai_config.json` for parts other than a text decoder; accel does not support models with these parts.
_OTHERS = ("encoder", "encoder_decoder_init", "vision", "speech", "embedding", "joiner")
GENERATION = "generation_config.json"
_SEARCH = (
    "do_sample", "max_length", "min_length", "no_repeat_ngram_size", "num_beams", "num_return_sequences", "repetition_penalty",
)  # fmt: skip
"""Search settings of onnxruntime-genai that have the same name in transformers (docs: "genai_config.json", version 0.18)."""
_SAMPLING = ("temperature", "top_k", "top_p")
_BEAMS = ("early_stopping", "length_penalty")
_NO_EFFECT = {"diversity_penalty": 0.0, "blank_penalty": 0.0}
"""Settings that accel does not support, each with the value that turns the setting off."""
_RUNTIME = ("past_present_share_buffer", "random_seed", "chunk_size", "batch_size", *_NO_EFFECT)
"""Settings that affect how onnxruntime-genai runs a graph, but not the generated text.

In accel, the caller sets the random seed.
"""
_SIZES = ("head_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Description:
    """The config and the manifest entries of a model folder.

    Attributes:
        config: The content of `config.json`.
        files: ONNX graph files by part, if a manifest lists them.
        written: Files for transformers, by file name, that the folder lacks and that are written into the artifact.
    """

    config: dict[str, Any]
    files: dict[Part, str] = field(default_factory=dict)
    written: dict[str, dict[str, Any]] = field(default_factory=dict)

    def task(self, folder: Path) -> str:
        """Infer the task from the config and the folder."""
        if self.written:
            # `written` has files only for folders of onnxruntime-genai, and accel supports only text decoders of
            # onnxruntime-genai.
            return text_decoder_task()
        return infer_task(self.config, folder)


def describe(folder: Path) -> Description:
    """Read the config of a folder and the manifest that another tool wrote into the folder.

    Raises:
        IntegrityError: A file is not a regular file, is a link to a file outside of the folder, or is not JSON.
        ArtifactNotFoundError: The manifest lists missing graphs, or kinds of graphs that accel does not support.
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
            f"{folder / EXPORT} lists the graphs {sorted(names)} in the format {kind!r}. accel reads the graphs "
            f"{', '.join(_PARTS)} in the formats {', '.join(_FORMATS)}.",
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
        content = (
            f"describes a model with {', '.join(others)}"
            if others
            else "does not contain the file name of a decoder graph"
        )
        raise ArtifactNotFoundError(
            f"{folder / GENAI} {content}. accel reads folders of onnxruntime-genai only if the model is a single decoder.",
            fix="run the folder with onnxruntime-genai, or export the original model: `accel export MODEL OUT`.",
        )
    files: dict[Part, str] = {"model": checked_file(folder, file)}
    tokens = {key: model[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if model.get(key) is not None}
    generation = {GENERATION: {**tokens, **_search(folder)}} if not (folder / GENERATION).exists() else {}
    if config:
        return Description(config, files, generation)
    settings = {
        "model_type": model.get("type"),
        "vocab_size": model.get("vocab_size"),
        "max_position_embeddings": model.get("context_length"),
        **tokens,
        **{{"head_size": "head_dim"}.get(key, key): decoder[key] for key in _SIZES if decoder.get(key) is not None},
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    return Description(settings, files, {CONFIG: settings, **generation})


def _search(folder: Path) -> dict[str, Any]:
    """Return the search settings of onnxruntime-genai that change generation, by their names in transformers.

    Raises:
        IntegrityError: accel does not support a setting.
    """
    settings = {
        key: value for key, value in (read_json(folder / GENAI).get("search") or {}).items() if value is not None
    }
    unknown = sorted(settings.keys() - {*_SEARCH, *_SAMPLING, *_BEAMS, *_RUNTIME})
    unread = [name for name in _NO_EFFECT if settings.get(name, _NO_EFFECT[name]) != _NO_EFFECT[name]]
    if unknown or unread:
        name = (unknown or unread)[0]
        raise IntegrityError(
            f"The search setting {name!r} in {folder / GENAI} is {settings[name]!r}; accel does not support this setting.",
            fix=f"remove the setting from {GENAI}, or write a {GENERATION}, which accel reads instead of these settings.",
        )
    used_names = {
        *_SEARCH,
        *(_SAMPLING if settings.get("do_sample") else ()),
        *(_BEAMS if settings.get("num_beams", 1) > 1 else ()),
    }
    return {name: value for name, value in settings.items() if name in used_names}
