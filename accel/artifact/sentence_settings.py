"""Settings that sentence-transformers saves with a model: how texts become vectors or scores.

`FIELDS` lists the files and fields that sentence-transformers 2 to 6 write. Unknown fields and unsupported values raise
an error, because the vectors or scores would differ from sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, IntegrityError, TaskError, did_you_mean
from .json_reading import read_json, read_json_list
from .tensor_specs import TensorSpec

MODULES = "modules.json"
GENERAL = "config_sentence_transformers.json"
# The file is usually named `sentence_bert_config.json`. The first versions of sentence-transformers named it after the model
# type.
_TRANSFORMER_FILES = "sentence_*_config.json"

Kind = Literal["", "embedder", "cross-encoder", "sparse encoder", "multi-vector encoder"]
_KINDS: Mapping[str, Kind] = {
    "SentenceTransformer": "embedder",
    "CrossEncoder": "cross-encoder",
    "SparseEncoder": "sparse encoder",
    "MultiVectorEncoder": "multi-vector encoder",
    # The library PyLate saves multi-vector models under the class name `ColBERT`.
    "ColBERT": "multi-vector encoder",
}
_SPARSE = ("SpladePooling", "SparseAutoEncoder", "CSRSparsity", "SparseStaticEmbedding", "IDF", "MLMTransformer")
_MULTI_VECTOR = ("MultiVectorMask", "TokenPooling")

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Pooling fields of sentence-transformers before version 5.5, in the order in which several poolings are concatenated."""
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")

READ, HARMLESS = "read", "harmless"
_EMPTY: tuple[Any, ...] = (None, {}, [])
_ON_VECTORS = (None, "sentence_embedding")

FIELDS: Mapping[str, Mapping[str, str | tuple[Any, ...]]] = {
    GENERAL: {
        "__version__": HARMLESS,
        "model_type": READ,
        "prompts": READ,
        "default_prompt_name": READ,
        "similarity_fn_name": READ,
        "truncate_dim": READ,
        "activation_fn": READ,
        "keep_in_fp32_modules": _EMPTY,
        "max_active_dims": (None,),
    },
    "Transformer": {
        "max_seq_length": READ,
        "do_lower_case": READ,
        "transformer_task": READ,
        "modality_config": READ,
        "module_output_name": (None, "token_embeddings", "scores"),
        # Unpadding does not change the vectors. It only avoids computation for padding tokens.
        "unpad_inputs": HARMLESS,
        "processing_kwargs": _EMPTY,
        "query_length": (None,),
        "document_length": (None,),
        "query_expansion": (None,),
        "tokenizer_name_or_path": (None,),
        **dict.fromkeys(("model_args", "model_kwargs", "config_args", "config_kwargs"), READ),
        **dict.fromkeys(("tokenizer_args", "tokenizer_kwargs", "processor_kwargs"), READ),
    },
    "Pooling": {
        "word_embedding_dimension": HARMLESS,
        "embedding_dimension": HARMLESS,
        "pooling_mode": READ,
        **dict.fromkeys(_FLAGS, READ),
        "include_prompt": READ,
    },
    "Dense": {
        "in_features": HARMLESS,
        "out_features": HARMLESS,
        "bias": HARMLESS,
        "activation_function": READ,
        "module_input_name": _ON_VECTORS,
        "module_output_name": _ON_VECTORS,
        "use_residual": (None, False),
    },
    "LayerNorm": {"dimension": HARMLESS},
    "Normalize": {"module_input_name": _ON_VECTORS, "module_output_name": _ON_VECTORS},
    "Dropout": {"dropout": HARMLESS},
}
"""Known fields, by file name or by module class. accel reads the field (`READ`), ignores it (`HARMLESS`), or accepts only
the values in a tuple and raises an error for other values.
"""

_DENSE_ACTIVATION = "torch.nn.Tanh"
# Arguments for loading weights and tokenizers. accel chooses their values itself.
_LOADING = (
    "attn_implementation", "cache_dir", "device_map", "dtype", "local_files_only", "low_cpu_mem_usage", "revision", "token",
    "torch_dtype", "trust_remote_code", "use_fast", "use_safetensors",
)  # fmt: skip
_ON_TEXT = {
    "feature-extraction": {"method": "forward", "method_output_name": "last_hidden_state"},
    "sequence-classification": {"method": "forward", "method_output_name": "logits"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceModule:
    """A module after the transformer.

    Attributes:
        kind: `Pooling`, `Dense`, `LayerNorm` or `Normalize`.
        folder: The folder with the module's config and weights.
        modes: For `Pooling`: the pooling modes over the tokens, concatenated in this order.
        include_prompt: For `Pooling`: whether the tokens of the prompt are included.
        activation: For `Dense`: the import path of a class in `torch.nn`.
    """

    kind: str
    folder: Path
    modes: tuple[str, ...] = ()
    include_prompt: bool = True
    activation: str = _DENSE_ACTIVATION


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceSettings:
    """The sentence-transformers settings of a folder. The defaults apply to a folder without such files.

    Attributes:
        folder: The folder.
        kind: The kind of model; empty if the folder has no files of sentence-transformers.
        prompts: Prefixes of a text by prompt name (for pairs: of the first text).
        default_prompt: Name of the prompt that is used by default.
        truncate_dim: Number of leading dimensions of a vector that are kept.
        similarity: Similarity measure for two vectors.
        activation: Import path of the class that turns the outputs of a cross-encoder into scores.
        max_length: Largest number of tokens of a text.
        lower: Whether texts are converted to lower case.
        layers: The modules after the transformer, in order.
        refusal: The reason why accel cannot compute vectors of this model; empty if it can.
    """

    folder: Path
    kind: Kind = ""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    truncate_dim: int | None = None
    similarity: str = "cosine"
    activation: str | None = None
    max_length: int | None = None
    lower: bool = False
    layers: tuple[SentenceModule, ...] = ()
    refusal: str = ""

    @property
    def include_prompt(self) -> bool:
        """Whether pooling includes the tokens of the prompt."""
        return all(layer.include_prompt for layer in self.layers)

    def prompt(self, name: str | None = None) -> str:
        """Return the prompt with this name, or the default prompt when `name` is `None`.

        Raises:
            ConfigError: The model has no prompt with that name.
        """
        chosen = name if name is not None else self.default_prompt
        if chosen is None:
            return ""
        if chosen not in self.prompts:
            raise ConfigError(
                f"The model in {self.folder} has no prompt named {chosen!r}.{did_you_mean(chosen, self.prompts)}",
                fix=f"use one of {sorted(self.prompts)}." if self.prompts else "leave the prompt name out.",
            )
        return self.prompts[chosen]

    def check_embeds(self) -> None:
        """Raise if accel cannot compute sentence embeddings with this model.

        Raises:
            TaskError: The model is of another kind, or has unsupported modules.
        """
        if self.refusal:
            raise TaskError(
                f"accel cannot compute sentence embeddings with the model in {self.folder}: {self.refusal}.",
                fix="use sentence-transformers for this model, or export it with task='feature-extraction' to get only its "
                "hidden states.",
            )


def sentence_kind(folder: Path) -> Kind:
    """Return the kind of a model from `modules.json` and `config_sentence_transformers.json`; empty without
    `modules.json`.

    Raises:
        IntegrityError: A file is damaged, or contains an unknown kind.
    """
    if not (folder / MODULES).is_file():
        return ""
    model_type = _json(folder / GENERAL).get("model_type")
    if model_type is not None:
        if model_type not in _KINDS:
            raise IntegrityError(
                f"model_type is {model_type!r} in {folder / GENERAL}, which is not a model type of sentence-transformers.",
                fix=f"set model_type to one of {', '.join(_KINDS)}.",
            )
        return _KINDS[model_type]
    # sentence-transformers before version 5 did not write `model_type`, so the kind follows from the modules.
    names = {_class(entry) for entry in _modules(folder)}
    if names & set(_SPARSE):
        return "sparse encoder"
    return "multi-vector encoder" if names & set(_MULTI_VECTOR) else "embedder"


def sentence_settings(folder: Path) -> SentenceSettings:
    """Read the sentence-transformers settings of a folder.

    Raises:
        IntegrityError: A file is damaged.
        ConfigError: A field is unknown, or has an unsupported value.
    """
    kind = sentence_kind(folder)
    general = _json(folder / GENERAL)
    if kind in ("sparse encoder", "multi-vector encoder"):
        return SentenceSettings(folder=folder, kind=kind, refusal=f"it is a {kind}")
    modules = _modules(folder) if kind else []
    _check(folder / GENERAL, general, FIELDS[GENERAL])
    first = folder / (modules[0]["path"] if modules and _class(modules[0]) == "Transformer" else "")
    path = next(iter(sorted(first.glob(_TRANSFORMER_FILES))), None)
    transformer = _json(path) if path is not None else {}
    limit = None
    refusal = "it is a cross-encoder" if kind == "cross-encoder" else ""
    if path is not None:
        _check(path, transformer, FIELDS["Transformer"])
        limit = _number(path, transformer, "max_seq_length")
        for name in ("tokenizer_args", "tokenizer_kwargs", "processor_kwargs"):
            limit = _number(path, transformer.get(name) or {}, "model_max_length") or limit
        _check_transformer(path, transformer, kind)
    layers: tuple[SentenceModule, ...] = ()
    if kind == "embedder":
        layers, refusal = _layers(folder, modules)
    elif kind == "cross-encoder" and [_class(entry) for entry in modules] != ["Transformer"]:
        others = ", ".join(_class(entry) for entry in modules[1:]) or _class(modules[0])
        raise TaskError(
            f"{folder} is a cross-encoder with the module {others}, which accel does not support.",
            fix="use sentence-transformers for this model.",
        )
    prompts = general.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise IntegrityError(
            f"prompts is {prompts!r:.100} in {folder / GENERAL}, but it must map prompt names to texts.",
            fix="correct the field, for example to {'query': 'query: '}.",
        )
    settings = SentenceSettings(
        folder=folder,
        kind=kind,
        prompts=prompts,
        default_prompt=general.get("default_prompt_name"),
        truncate_dim=_number(folder / GENERAL, general, "truncate_dim"),
        similarity=general.get("similarity_fn_name") or "cosine",
        activation=general.get("activation_fn"),
        max_length=limit,
        lower=bool(transformer.get("do_lower_case")),
        layers=layers,
        refusal=refusal,
    )
    if settings.similarity not in SIMILARITIES:
        raise ConfigError(
            f"similarity_fn_name is {settings.similarity!r} in {folder / GENERAL}, which accel does not support.",
            fix=f"set similarity_fn_name to one of {', '.join(SIMILARITIES)}.",
        )
    settings.prompt()
    return settings


def embedding_roles(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return the transformers name for each output of a text model's graph that another tool named differently.

    The keys are the output names in the graph. The result is empty if no output needs another name.
    """
    ranks = {spec.name: len(spec.shape) for spec in outputs}
    if "last_hidden_state" in ranks or all(spec.name != "input_ids" for spec in inputs):
        return {}
    # Optimum names the hidden states of sentence-transformers models `token_embeddings`.
    hidden = [name for name in ranks if name == "token_embeddings"] or [
        name for name, rank in ranks.items() if rank == 3
    ]
    if len(hidden) == 1:
        return {hidden[0]: "last_hidden_state"}
    vectors = [name for name, rank in ranks.items() if rank == 2 and name != "pooler_output"]
    return {vectors[0]: "sentence_embedding"} if len(ranks) == len(vectors) == 1 else {}


def _layers(folder: Path, modules: list[dict[str, Any]]) -> tuple[tuple[SentenceModule, ...], str]:
    """Return the modules after the transformer; or no modules and the reason why they are not supported."""
    if not modules or _class(modules[0]) != "Transformer":
        return (), f"its first module is {_class(modules[0])} and not a Transformer" if modules else "it has no modules"
    layers = []
    for entry in modules[1:]:
        name = _class(entry)
        if name not in ("Pooling", "Dense", "LayerNorm", "Normalize", "Dropout"):
            return (), f"its module {name} is not supported"
        place = folder / entry["path"]
        file = place / "config.json"
        config = _json(file)
        _check(file, config, FIELDS[name])
        if name != "Dropout":
            layers.append(
                SentenceModule(
                    kind=name,
                    folder=place,
                    modes=_modes(file, config) if name == "Pooling" else (),
                    include_prompt=config.get("include_prompt", True) is True,
                    activation=config.get("activation_function", _DENSE_ACTIVATION),
                )
            )
    pooled = [layer.kind for layer in layers[:1]] == ["Pooling"] and all(
        other.kind != "Pooling" for other in layers[1:]
    )
    return (tuple(layers), "") if pooled else ((), "its first module after the transformer is not its only Pooling")


def _modes(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    pooling_mode = config.get("pooling_mode")
    if pooling_mode is None:
        return tuple(mode for flag, mode in _FLAGS.items() if config.get(flag)) or ("mean",)
    modes = (
        (pooling_mode,)
        if isinstance(pooling_mode, str)
        else tuple(pooling_mode)
        if isinstance(pooling_mode, list)
        else ()
    )
    if not modes or not set(modes) <= set(POOLING_MODES):
        raise ConfigError(
            f"pooling_mode is {pooling_mode!r} in {path}, which accel does not support.",
            fix=f"set pooling_mode to one or several of {', '.join(POOLING_MODES)}.",
        )
    return modes


def _check(path: Path, values: Mapping[str, Any], supported: Mapping[str, str | tuple[Any, ...]]) -> None:
    """Raise for unknown fields and unsupported values."""
    for name, value in values.items():
        use = supported.get(name)
        if use is None or (isinstance(use, tuple) and not any(value == allowed for allowed in use)):
            raise ConfigError(
                f"{name} is {value!r:.100} in {path}. accel does not support this setting, so its results would differ from "
                "those of sentence-transformers.",
                fix="use sentence-transformers for this model, or remove the field if your results do not depend on it.",
            )


def _check_transformer(path: Path, values: Mapping[str, Any], kind: Kind) -> None:
    task = "sequence-classification" if kind == "cross-encoder" else "feature-extraction"
    written = values.get("transformer_task", task)
    modalities = values.get("modality_config")
    if kind and written != task:
        raise ConfigError(
            f"transformer_task is {written!r} in {path}. For a model of the kind {kind!r}, accel supports only {task!r}.",
            fix="use sentence-transformers for this model.",
        )
    # If `modality_config` contains `message`, sentence-transformers applies the model's chat template to every text.
    if modalities is not None and (
        not isinstance(modalities, dict) or "message" in modalities or modalities.get("text") != _ON_TEXT[task]
    ):
        raise ConfigError(
            f"modality_config is {modalities!r:.200} in {path}. accel supports only texts without a chat template: "
            f"{ {'text': _ON_TEXT[task]} }.",
            fix="use sentence-transformers for this model.",
        )
    for name in ("model_args", "model_kwargs", "config_args", "config_kwargs"):
        _check(path, values.get(name) or {}, dict.fromkeys(_LOADING, HARMLESS))
    for name in ("tokenizer_args", "tokenizer_kwargs", "processor_kwargs"):
        _check(path, values.get(name) or {}, dict.fromkeys((*_LOADING, "model_max_length"), HARMLESS))


def _modules(folder: Path) -> list[dict[str, Any]]:
    """Return the checked entries of `modules.json`."""
    path = folder / MODULES
    entries = read_json_list(path)
    for entry in entries:
        kind, place = entry.get("type"), entry.get("path")
        if not isinstance(kind, str) or not isinstance(place, str) or ".." in Path(place).parts:
            raise IntegrityError(
                f"{path} contains a module without a valid type or path: {entry!r:.200}.",
                fix="copy the file again from the original model. If the folder has no modules.json, pass pooling=...",
            )
    return entries


def _class(entry: Mapping[str, Any]) -> str:
    """Return the class name of a module; with its package if the package is not sentence-transformers."""
    package, _, name = str(entry["type"]).rpartition(".")
    return name if package.partition(".")[0] == "sentence_transformers" else str(entry["type"])


def _number(path: Path, values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise IntegrityError(
            f"{name} is {value!r:.100} in {path}, but it must be a whole number above 0.", fix="correct the field."
        )
    return value


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
