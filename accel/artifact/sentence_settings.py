"""Settings that sentence-transformers saves with a model: how texts become vectors or scores.

The supported files and fields are in `sentence_fields`. Unsupported settings raise an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, IntegrityError, TaskError, did_you_mean
from .json_reading import read_json, read_json_list
from .sentence_fields import (
    FIELDS,
    GENERAL,
    HARMLESS,
    MODULES,
    MULTI_VECTOR_HEAD,
    POOLING_FLAGS,
    POOLING_MODES,
    ROUTER_CONFIG,
    SPARSE_HEAD,
    STANFORD_CONFIG,
    TOKEN_VECTORS,
    check_fields,
    number_field,
)
from .tensor_specs import TensorSpec

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
_PYLATE = "ColBERT"
# The architecture in the config.json of the checkpoints of Stanford's ColBERT, which have no modules.json.
_STANFORD = "HF_ColBERT"
# Older names of modules. PyLate's module for the projection of token embeddings has the fields of Dense.
_ALIASES = {"pylate.models.Dense.Dense": "Dense", "CSRSparsity": "SparseAutoEncoder", "IDF": "SparseStaticEmbedding"}
_SPARSE = ("SpladePooling", "SparseAutoEncoder", "SparseStaticEmbedding", "MLMTransformer")
_MULTI_VECTOR = ("MultiVectorMask",)
_TRANSFORMERS = ("Transformer", "MLMTransformer")
STATIC_EMBEDDING = "StaticEmbedding"
"""Class name of the module of models that look up one vector per token."""
_ROUTERS = ("Router", "Asym")
_ON_VECTORS = ("Dense", "LayerNorm", "Normalize", "Dropout")

QUERY, DOCUMENT = "query", "document"
"""The two sides of a search. They are names of a router's paths and of prompts."""
PROMPTS: Mapping[str, tuple[str, ...]] = {QUERY: (QUERY,), DOCUMENT: (DOCUMENT, "passage", "corpus")}
"""Names of the default prompt of a side. The first name that the model has is used."""
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_MULTI_VECTOR_SIMILARITIES = ("maxsim", "meanmaxsim")
_USUAL_SIMILARITY = {"sparse encoder": "dot", "multi-vector encoder": "maxsim"}

_DENSE_ACTIVATION = "torch.nn.Tanh"
_PUNCTUATION = tuple("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
# Arguments for loading weights and tokenizers. accel chooses their values itself.
_LOADING = (
    "attn_implementation", "cache_dir", "device_map", "dtype", "local_files_only", "low_cpu_mem_usage", "revision", "token",
    "torch_dtype", "trust_remote_code", "use_fast", "use_safetensors",
)  # fmt: skip
# The head of the transformer (`transformer_task`), the output that sentence-transformers reads, and the class that loads it.
_HEADS = {
    "feature-extraction": ("last_hidden_state", ""),
    "sequence-classification": ("logits", ""),
    "fill-mask": ("logits", "AutoModelForMaskedLM"),
    "text-generation": ("logits", "AutoModelForCausalLM"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceModule:
    """A module after the transformer.

    Attributes:
        kind: Class name of the module in sentence-transformers, such as `Pooling` or `Dense`.
        folder: The folder with the module's config and weights.
        modes: For `Pooling`: the pooling modes over the tokens, concatenated in this order.
        include_prompt: For `Pooling`: whether the tokens of the prompt are included.
        activation: For `Dense`: the import path of a class in `torch.nn`.
        residual: For `Dense`: whether the input is added to the output.
        sums: For `SpladePooling`: whether the weights of a token's occurrences are added. Otherwise, the largest weight is used.
        twice: For `SpladePooling`: whether the logarithm is applied twice.
        active: For `SparseAutoEncoder`: number of dimensions that are not zero.
        standardized: For `SparseAutoEncoder`: whether the input is standardized.
    """

    kind: str
    folder: Path
    modes: tuple[str, ...] = ()
    include_prompt: bool = True
    activation: str = _DENSE_ACTIVATION
    residual: bool = False
    sums: bool = False
    twice: bool = False
    active: int = 0
    standardized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryExpansion:
    """Tokens that a multi-vector model appends to each query.

    Attributes:
        length: Number of tokens of a query with the appended tokens.
        truncates: Whether longer queries are truncated to `length`.
        attended: Whether other tokens attend to the appended tokens. Their vectors are used for scores in both cases.
        token: The appended token. `None` means the mask token, or the end token of a tokenizer without a mask token.
    """

    length: int
    truncates: bool
    attended: bool
    token: str | None = None


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
        layers: The modules after the transformer, in order. If the model has a router, the modules of its default path.
        transformer: The folder with the transformer's config, weights and tokenizer.
        auto_model: Auto class of transformers that loads the transformer with its head; empty for the task's usual class.
        side: With a router: the side (`QUERY` or `DOCUMENT`) of its default path.
        other_layers: With a router: the modules of the path for the other side.
        token_table: With a router: the folder with one weight per token, from which the vectors of queries are computed without the
            transformer.
        max_active_dims: For sparse encoders: largest number of dimensions of a vector that are not zero.
        lengths: Largest number of tokens of a query and of a document, by side.
        expansion: Tokens that are appended to queries.
        skipped_words: Tokens whose vectors are not used for scores.
        skipped_sides: Sides to which `skipped_words` applies.
        scored_ids: The only token ids of documents whose vectors are used for scores; empty for all.
        prefixes: Texts at the start of queries and documents that the tokenizer must read as one token.
        sparse_head, multi_vector_head: Weights of BGE-M3's further outputs; `None` if the folder has no such file.
        answers: For rerankers that are language models: ids of the tokens whose logits are compared. The score is the logit of the
            first token, minus the logit of the second if there is one.
        chat: Whether a reranker's input is made with the tokenizer's chat template, and the format of its messages (`flat` or
            `structured`); empty if not.
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
    transformer: Path | None = None
    auto_model: str = ""
    side: str = ""
    other_layers: tuple[SentenceModule, ...] = ()
    token_table: Path | None = None
    max_active_dims: int | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)
    expansion: QueryExpansion | None = None
    skipped_words: tuple[str, ...] = ()
    skipped_sides: tuple[str, ...] = (DOCUMENT,)
    scored_ids: tuple[int, ...] = ()
    prefixes: tuple[str, ...] = ()
    sparse_head: Path | None = None
    multi_vector_head: Path | None = None
    answers: tuple[int, ...] = ()
    chat: str = ""
    refusal: str = ""

    @property
    def other_side(self) -> str:
        """With a router: the side that is not the default path."""
        return DOCUMENT if self.side == QUERY else QUERY

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

    def default_prompt_of(self, side: str) -> str | None:
        """Return the name of the prompt for queries or documents, or `None` if the model has none."""
        return next((name for name in PROMPTS[side] if name in self.prompts), None)


def sentence_kind(folder: Path) -> Kind:
    """Return the kind of a model from `modules.json` and `config_sentence_transformers.json`; empty without `modules.json`. The files of
    BGE-M3's heads also make a model an embedder.

    Raises:
        IntegrityError: A file is damaged, or contains an unknown kind.
    """
    if not (folder / MODULES).is_file():
        if _STANFORD in (_json(folder / "config.json").get("architectures") or ()):
            return "multi-vector encoder"
        return "embedder" if any((folder / name).is_file() for name in (SPARSE_HEAD, MULTI_VECTOR_HEAD)) else ""
    model_type = _json(folder / GENERAL).get("model_type")
    if model_type is not None:
        if model_type not in _KINDS:
            raise IntegrityError(
                f"model_type is {model_type!r} in {folder / GENERAL}, which is not a model type of sentence-transformers.",
                fix=f"set model_type to one of {', '.join(_KINDS)}.",
            )
        return _KINDS[model_type]
    # sentence-transformers before version 5 did not write `model_type`, so the kind follows from the modules.
    names = {module_class(entry) for entry in _modules(folder)}
    if names & set(_SPARSE):
        return "sparse encoder"
    return "multi-vector encoder" if names & set(_MULTI_VECTOR) else "embedder"


def first_module_is_static(folder: Path) -> bool:
    """Return whether the first module of a sentence-transformers folder is a static embedding, which has no transformer.

    Raises:
        IntegrityError: `modules.json` is damaged.
    """
    modules = _modules(folder) if (folder / MODULES).is_file() else []
    return bool(modules) and module_class(modules[0]) == STATIC_EMBEDDING


def transformer_folder(folder: Path) -> Path:
    """Return the folder with the config, the weights and the tokenizer of a model's transformer.

    It is a subfolder for models whose first module is a router, and `folder` itself for all other models.
    """
    if not (folder / MODULES).is_file():
        return folder
    places = {
        place for path in _paths(folder, _modules(folder)).values() for kind, place in path if kind in _TRANSFORMERS
    }
    return places.pop() if len(places) == 1 else folder


def sentence_settings(folder: Path) -> SentenceSettings:
    """Read the sentence-transformers settings of a folder.

    Raises:
        IntegrityError: A file is damaged.
        ConfigError: A field is unknown, or has an unsupported value.
        TaskError: A cross-encoder has modules that accel does not support.
    """
    kind = sentence_kind(folder)
    general_file = folder / GENERAL
    general = _json(general_file)
    modules = _modules(folder) if (folder / MODULES).is_file() else []
    check_fields(general_file, general, FIELDS[GENERAL])
    paths = _paths(folder, modules)
    transformers = {place: name for path in paths.values() for name, place in path if name in _TRANSFORMERS}
    first = next(iter(transformers), folder)
    path = next(iter(sorted(first.glob(_TRANSFORMER_FILES))), None)
    transformer = _json(path) if path is not None else {}
    limit = None
    if path is not None:
        check_fields(path, transformer, FIELDS["Transformer"])
        limit = number_field(path, transformer, "max_seq_length")
        for name in ("tokenizer_args", "tokenizer_kwargs", "processor_kwargs"):
            limit = number_field(path, transformer.get(name) or {}, "model_max_length") or limit
    usual_head = {"cross-encoder": "sequence-classification"}.get(kind, "feature-extraction")
    usual_head = "fill-mask" if transformers.get(first) == "MLMTransformer" else usual_head
    head = transformer.get("transformer_task") or usual_head
    if path is not None:
        _check_transformer(path, transformer, kind, head)
    prompts = general.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise IntegrityError(
            f"prompts is {prompts!r:.100} in {general_file}, but it must map prompt names to texts.",
            fix="correct the field, for example to {'query': 'query: '}.",
        )
    settings = SentenceSettings(
        folder=folder,
        kind=kind,
        prompts=prompts,
        default_prompt=general.get("default_prompt_name"),
        truncate_dim=number_field(general_file, general, "truncate_dim"),
        similarity=general.get("similarity_fn_name") or _USUAL_SIMILARITY.get(kind, "cosine"),
        activation=general.get("activation_fn"),
        max_length=limit,
        lower=bool(transformer.get("do_lower_case")),
        transformer=first,
        auto_model=_HEADS[head][1],
        max_active_dims=number_field(general_file, general, "max_active_dims"),
        sparse_head=_file(folder / SPARSE_HEAD),
        multi_vector_head=_file(folder / MULTI_VECTOR_HEAD),
    )
    if kind == "cross-encoder":
        settings = _with_answers(settings, paths[""], transformer)
    elif len(transformers) > 1:
        settings = replace(settings, refusal="the paths of its router have different transformers")
    elif kind and modules:
        settings = _with_layers(settings, paths, _default_side(folder, modules))
        if kind == "multi-vector encoder" and not settings.refusal:
            settings = _with_scored_tokens(settings, path or folder, transformer, general_file, general, paths[""])
    elif kind == "multi-vector encoder":
        settings = _of_stanford(settings)
    elif kind:
        # FlagEmbedding saves no modules.json. Its dense vectors are the normalized states of the first token.
        pooled = SentenceModule(kind="Pooling", folder=folder, modes=("cls",))
        settings = replace(settings, layers=(pooled, SentenceModule(kind="Normalize", folder=folder)))
    if kind == "multi-vector encoder":
        # PyLate writes `MaxSim`.
        settings = replace(settings, similarity=settings.similarity.lower())
    supported = _MULTI_VECTOR_SIMILARITIES if kind == "multi-vector encoder" else SIMILARITIES
    if settings.similarity not in supported:
        raise ConfigError(
            f"similarity_fn_name is {settings.similarity!r} in {general_file}, which accel does not support.",
            fix=f"set similarity_fn_name to one of {', '.join(supported)}.",
        )
    settings.prompt()
    return settings


def embedding_roles(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return the transformers name for each output of a text model's graph that another tool named differently.

    The keys are the output names in the graph. The result is empty if no output needs another name.
    """
    ranks = {spec.name: len(spec.shape) for spec in outputs}
    if "last_hidden_state" in ranks or TOKEN_VECTORS in ranks or all(spec.name != "input_ids" for spec in inputs):
        return {}
    # Optimum names the hidden states of sentence-transformers models `token_embeddings`.
    hidden = [name for name in ranks if name == "token_embeddings"] or [
        name for name, rank in ranks.items() if rank == 3
    ]
    if len(hidden) == 1:
        return {hidden[0]: "last_hidden_state"}
    vectors = [name for name, rank in ranks.items() if rank == 2 and name != "pooler_output"]
    return {vectors[0]: "sentence_embedding"} if len(ranks) == len(vectors) == 1 else {}


def _paths(folder: Path, modules: list[dict[str, Any]]) -> dict[str, list[tuple[str, Path]]]:
    """Return the class and the folder of each module, by the path of the router. Without a router, the only path is named `""`.

    Raises:
        IntegrityError: The config of the router is damaged.
    """
    paths: dict[str, list[tuple[str, Path]]] = {"": []}
    for entry in modules:
        place = folder / entry["path"]
        if (name := module_class(entry)) not in _ROUTERS:
            for path in paths.values():
                path.append((name, _existing(place, folder)))
            continue
        config = _router_config(place)
        routes = {side: [_part(place, config, part) for part in parts] for side, parts in config["structure"].items()}
        paths = {
            side: [*before, *((kind, _existing(at, folder) if kind in _TRANSFORMERS else at) for kind, at in parts)]
            for before in paths.values()
            for side, parts in routes.items()
        }
    return paths


def _existing(place: Path, folder: Path) -> Path:
    """Return the folder of a module. An artifact has the files of a transformer's subfolder in its main folder."""
    return place if place.is_dir() else folder


def _part(place: Path, config: Mapping[str, Any], part: Any) -> tuple[str, Path]:
    """Return the class and the folder of a module of a router."""
    entry = {"type": config["types"].get(part), "path": part}
    if (
        not isinstance(entry["type"], str)
        or not isinstance(part, str)
        or ".." in Path(part).parts
        or Path(part).is_absolute()
    ):
        raise IntegrityError(
            f"The router in {place} contains the module {part!r:.100} without a valid type or path.",
            fix="copy the router's config again from the original model.",
        )
    return module_class(entry), place / part


def _router_config(place: Path) -> dict[str, Any]:
    """Return the config of a router. sentence-transformers before version 5 named the file `config.json`."""
    file = next((place / name for name in (ROUTER_CONFIG, "config.json") if (place / name).is_file()), None)
    config = _json(file) if file is not None else {}
    if not isinstance(config.get("types"), dict) or not isinstance(config.get("structure"), dict):
        raise IntegrityError(
            f"{place} contains no valid {ROUTER_CONFIG}, which lists the modules of the router.",
            fix="copy the file again from the original model.",
        )
    return config


def _default_side(folder: Path, modules: list[dict[str, Any]]) -> str:
    """Return the path of the router that is used for texts that are neither queries nor documents; empty without a router."""
    for entry in modules:
        if module_class(entry) in _ROUTERS:
            config = _router_config(folder / entry["path"])
            parameters = config.get("parameters") or {}
            return str(parameters.get("default_route") or next(iter(config["structure"]), ""))
    return ""


def _with_layers(
    settings: SentenceSettings, paths: Mapping[str, list[tuple[str, Path]]], default: str
) -> SentenceSettings:
    """Return settings with the modules after the transformer; or with the reason why they are not supported."""
    if default and not set(paths) <= {QUERY, DOCUMENT}:
        return replace(settings, refusal=f"its router has the paths {', '.join(paths)} instead of query and document")
    layers: dict[str, tuple[SentenceModule, ...]] = {}
    table = None
    for side, path in paths.items():
        if [kind for kind, _ in path] == ["SparseStaticEmbedding"] and side == QUERY != default:
            table = path[0][1]
            check_fields(table / "config.json", _json(table / "config.json"), FIELDS["SparseStaticEmbedding"])
            continue
        layers[side], refusal = _layers(settings.kind, path)
        if refusal:
            return replace(settings, refusal=refusal)
    others = [side for side in layers if side != default]
    active = [layer.active for layer in layers[default] if layer.active]
    return replace(
        settings,
        side=default,
        layers=layers[default],
        other_layers=layers[others[0]] if others else (),
        token_table=table,
        max_active_dims=settings.max_active_dims or next(iter(active), None),
    )


_ALLOWED: Mapping[str, tuple[str, ...]] = {
    "embedder": ("Pooling", *_ON_VECTORS),
    "sparse encoder": ("Pooling", "SpladePooling", "SparseAutoEncoder", *_ON_VECTORS),
    "multi-vector encoder": ("MultiVectorMask", "Dense", "LayerNorm", "Normalize", "Dropout"),
}
_REASONS = {
    "TokenPooling": "merges the vectors of similar tokens by clustering, which a graph cannot compute",
    STATIC_EMBEDDING: "looks up one vector per token, and a router with a static embedding and a transformer contains two models",
    "SparseStaticEmbedding": "looks up one weight per token without a transformer, for documents too",
    "WordWeights": "weights words of a vocabulary that is not the tokenizer's",
    "BoW": "counts words, which are found by Python code instead of a tokenizer",
    "WordEmbeddings": "looks up one vector per word, and the words are found by Python code instead of a tokenizer",
    "CNN": "has weights of its own that accel does not read",
    "LSTM": "has weights of its own that accel does not read",
    "WeightedLayerPooling": "reads the hidden states of all layers",
    "CLIPModel": "embeds images and texts with two models",
}


def _layers(kind: str, path: Sequence[tuple[str, Path]]) -> tuple[tuple[SentenceModule, ...], str]:
    """Return the modules after the transformer; or no modules and the reason why they are not supported."""
    if not path or path[0][0] not in _TRANSFORMERS:
        if not path:
            return (), "it has no modules"
        name = path[0][0]
        because = f", which {_REASONS[name]}" if name in _REASONS else ""
        return (), f"its first module is {name} and not a Transformer{because}"
    layers = []
    for name, place in path[1:]:
        if name not in _ALLOWED[kind]:
            because = f": it {_REASONS[name]}" if name in _REASONS else ""
            return (), f"its module {name} is not supported{because}"
        file = place / "config.json"
        # A module without files can have the folder of the model, whose config.json describes the transformer.
        config = {} if (place / "modules.json").is_file() else _json(file)
        check_fields(file, config, FIELDS[name])
        _check_tensors(file, config, by_token=kind == "multi-vector encoder")
        if name not in ("Dropout", "MultiVectorMask"):
            layers.append(
                SentenceModule(
                    kind=name,
                    folder=place,
                    modes=_modes(file, config) if name == "Pooling" else (),
                    include_prompt=config.get("include_prompt", True) is True,
                    activation=config.get("activation_function", _DENSE_ACTIVATION),
                    residual=config.get("use_residual") is True,
                    sums=config.get("pooling_strategy") == "sum",
                    twice=config.get("activation_function") == "log1p_relu",
                    active=number_field(file, config, "k") or 8 if name == "SparseAutoEncoder" else 0,
                    standardized=config.get("normalize") is True,
                )
            )
    pools = [i for i, layer in enumerate(layers) if layer.kind in ("Pooling", "SpladePooling")]
    if pools != ([] if kind == "multi-vector encoder" else [0]):
        return (), "its first module after the transformer is not its only Pooling"
    return tuple(layers), ""


def _check_tensors(path: Path, config: Mapping[str, Any], *, by_token: bool) -> None:
    """Check that a module reads and writes the vectors of texts, or those of tokens in a multi-vector model."""
    expected = "token_embeddings" if by_token else "sentence_embedding"
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (None, expected):
            check_fields(path, {name: config[name]}, {name: (expected,)})


def _with_answers(
    settings: SentenceSettings, path: Sequence[tuple[str, Path]], transformer: Mapping[str, Any]
) -> SentenceSettings:
    """Return the settings of a cross-encoder, with the answer tokens of a language model.

    Raises:
        TaskError: The model has modules that accel does not support.
    """
    settings = replace(settings, refusal="it is a cross-encoder")
    names = [name for name, _ in path]
    language_model = settings.auto_model == _HEADS["text-generation"][1]
    if names != (["Transformer", "LogitScore"] if language_model else ["Transformer"]):
        raise TaskError(
            f"{settings.folder} is a cross-encoder with the modules {', '.join(names)}, which accel does not support. It supports "
            "a Transformer alone, or a language model with LogitScore.",
            fix="use sentence-transformers for this model.",
        )
    if not language_model:
        return settings
    file = path[1][1] / "config.json"
    config = _json(file)
    check_fields(file, config, FIELDS["LogitScore"])
    ids = [config.get(name) for name in ("true_token_id", "false_token_id")]
    if not isinstance(ids[0], int) or not isinstance(ids[1], int | None):
        raise IntegrityError(
            f"true_token_id and false_token_id are {ids} in {file}, but they must be token ids.",
            fix="copy the file again from the original model.",
        )
    message = (transformer.get("modality_config") or {}).get("message")
    return replace(
        settings,
        answers=tuple(i for i in ids if i is not None),
        chat="" if message is None else str(message.get("format", "structured")),
    )


_OF_PYLATE = {
    "query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens", "query_prefix",
    "document_prefix", "skiplist_words",
}  # fmt: skip


def _with_scored_tokens(
    settings: SentenceSettings,
    path: Path,
    transformer: Mapping[str, Any],
    general_file: Path,
    general: Mapping[str, Any],
    modules: Sequence[tuple[str, Path]],
) -> SentenceSettings:
    """Return settings with the lengths, the query expansion and the scored tokens of a multi-vector model."""
    pylate = general.get("model_type") == _PYLATE
    settings = replace(settings, skipped_words=_PUNCTUATION if pylate else ())
    for name, place in modules:
        if name == "MultiVectorMask":
            mask = _json(place / "config.json")
            sides = mask.get("skiplist_tasks")
            settings = replace(
                settings,
                skipped_words=tuple(mask.get("skiplist_words") or ()),
                skipped_sides=(DOCUMENT,) if sides is None else (sides,) if isinstance(sides, str) else tuple(sides),
                scored_ids=tuple(mask.get("keep_only_token_ids") or ()),
            )
    if general.get("skiplist_words") is not None:
        settings = replace(settings, skipped_words=tuple(general["skiplist_words"]))
    prefixes = {side: general.get(f"{side}_prefix") or "" for side in (QUERY, DOCUMENT)}
    prompts = dict(settings.prompts)
    for side, prefix in prefixes.items():
        if f"{side}_prefix" in general:
            prompts[side] = prefix + (prompts.get(side) or "").removeprefix(prefix)
    lengths = {}
    for side in (QUERY, DOCUMENT):
        name = f"{side}_length"
        length = number_field(path, transformer, name) or number_field(general_file, general, name)
        if length is not None:
            lengths[side] = length
    expansion = transformer.get("query_expansion", general.get("query_expansion"))
    # PyLate appends tokens to queries unless `do_query_expansion` is false.
    expands = "query_expansion" not in general and general.get("do_query_expansion") is not False
    if expansion is None and expands and _OF_PYLATE & set(general):
        attended = general.get("attend_to_expansion_tokens", general.get("attend_to_mask_tokens"))
        expansion = {"strategy": "fixed", "attend": bool(attended), "length": lengths.pop(QUERY, 32)}
    layers = settings.layers
    if pylate and "Normalize" not in [layer.kind for layer in layers]:
        # PyLate normalizes the vectors outside of its modules.
        layers = (*layers, SentenceModule(kind="Normalize", folder=settings.folder))
    return replace(
        settings,
        prompts=prompts,
        prefixes=tuple(prefix for prefix in prefixes.values() if prefix),
        lengths=lengths,
        expansion=_expansion(path, expansion),
        layers=layers,
    )


def _of_stanford(settings: SentenceSettings) -> SentenceSettings:
    """Return the settings of a checkpoint of Stanford's ColBERT, whose defaults are those of sentence-transformers.

    The markers of queries and documents are tokens of the vocabulary. The projection `linear.weight` is stored with the transformer.

    Raises:
        IntegrityError: A length is not a whole number above 0.
    """
    file = settings.folder / STANFORD_CONFIG
    values = _json(file)
    markers = {
        QUERY: values.get("query_token_id") or "[unused0]",
        DOCUMENT: values.get("doc_token_id") or "[unused1]",
    }
    prompts = {side: f"{marker} " for side, marker in markers.items()}
    length = number_field(file, values, "doc_maxlen")
    return replace(
        settings,
        prompts={**prompts, **settings.prompts},
        prefixes=tuple(prompts.values()),
        lengths={} if length is None else {DOCUMENT: length},
        expansion=QueryExpansion(
            length=number_field(file, values, "query_maxlen") or 32,
            truncates=True,
            attended=values.get("attend_to_mask_tokens") is True,
        ),
        skipped_words=_PUNCTUATION if values.get("mask_punctuation", True) else (),
        layers=(
            SentenceModule(kind="Dense", folder=settings.folder, activation="torch.nn.Identity"),
            SentenceModule(kind="Normalize", folder=settings.folder),
        ),
    )


_EXPANSION_FIELDS = {"strategy", "attend", "token", "length"}


def _expansion(path: Path, values: Any) -> QueryExpansion | None:
    if values is None:
        return None
    length = values.get("length") if isinstance(values, dict) else None
    if not isinstance(values, dict) or set(values) - _EXPANSION_FIELDS or not isinstance(length, int) or length < 1:
        raise ConfigError(
            f"query_expansion is {values!r:.200} in {path}, but it must have the fields strategy and length, and may have attend "
            "and token.",
            fix="correct the field, for example to {'strategy': 'fixed', 'length': 32}.",
        )
    if values.get("strategy") not in ("fixed", "min"):
        raise ConfigError(
            f"The strategy of query_expansion is {values.get('strategy')!r} in {path}, which accel does not support.",
            fix="set the strategy to 'fixed' or 'min'.",
        )
    return QueryExpansion(
        length=length,
        truncates=values["strategy"] == "fixed",
        attended=values.get("attend") is True,
        token=values.get("token"),
    )


def _modes(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    pooling_mode = config.get("pooling_mode")
    if pooling_mode is None:
        return tuple(mode for flag, mode in POOLING_FLAGS.items() if config.get(flag)) or ("mean",)
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


_SUPPORTED_HEADS: Mapping[str, tuple[str, ...]] = {
    "embedder": ("feature-extraction",),
    "cross-encoder": ("sequence-classification", "text-generation"),
    "sparse encoder": ("fill-mask", "feature-extraction"),
    "multi-vector encoder": ("feature-extraction",),
}


def _check_transformer(path: Path, values: Mapping[str, Any], kind: Kind, head: str) -> None:
    supported = _SUPPORTED_HEADS.get(kind, tuple(_HEADS))
    if head not in supported:
        raise ConfigError(
            f"transformer_task is {head!r} in {path}. For a model of the kind {kind!r}, accel supports only {' and '.join(supported)}.",
            fix="use sentence-transformers for this model.",
        )
    output = {"method": "forward", "method_output_name": _HEADS[head][0]}
    modalities = values.get("modality_config")
    allowed: list[Any] = [None, {"text": output}]
    if head == "text-generation":
        # With `message`, sentence-transformers makes the model's input with the chat template.
        message = (modalities or {}).get("message") if isinstance(modalities, dict) else None
        form = message.get("format") if isinstance(message, dict) else None
        both = [{**output, "format": form}] if form in ("flat", "structured") else []
        allowed += [entry for written in both for entry in ({"text": output, "message": written}, {"message": written})]
    if modalities not in allowed:
        raise ConfigError(
            f"modality_config is {modalities!r:.200} in {path}. accel supports only texts, and a chat template only for language "
            f"models that rerank: {allowed[1]}.",
            fix="use sentence-transformers for this model.",
        )
    for name in ("model_args", "model_kwargs", "config_args", "config_kwargs"):
        check_fields(path, values.get(name) or {}, dict.fromkeys(_LOADING, HARMLESS))
    for name in ("tokenizer_args", "tokenizer_kwargs", "processor_kwargs"):
        check_fields(path, values.get(name) or {}, dict.fromkeys((*_LOADING, "model_max_length"), HARMLESS))


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


def module_class(entry: Mapping[str, Any]) -> str:
    """Return the class name of an entry of `modules.json`; with its package if the package is not sentence-transformers."""
    package, _, name = str(entry["type"]).rpartition(".")
    if package.partition(".")[0] != "sentence_transformers":
        name = str(entry["type"])
    return _ALIASES.get(name, name)


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _file(path: Path) -> Path | None:
    return path if path.is_file() else None
