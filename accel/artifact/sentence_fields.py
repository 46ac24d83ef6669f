"""Files and fields that sentence-transformers 2 to 6, PyLate and FlagEmbedding write, and checks of their values.

Unknown fields and unsupported values raise an error, because the vectors or scores would differ from those of the library
that wrote the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, IntegrityError

MODULES = "modules.json"
GENERAL = "config_sentence_transformers.json"
ROUTER_CONFIG = "router_config.json"
STATIC_PADDING = "[accel-padding]"
"""Padding token that accel adds to static embedding models. Its vector is zero."""
STANFORD_CONFIG = "artifact.metadata"
"""File of a checkpoint of Stanford's ColBERT with its lengths and markers, as JSON."""
SPARSE_HEAD, MULTI_VECTOR_HEAD = "sparse_linear.pt", "colbert_linear.pt"
"""Files next to the weights of a BGE-M3 model, as FlagEmbedding writes them."""

VECTORS, TOKEN_VECTORS, TOKEN_WEIGHTS = "sentence_embedding", "multi_vector_embedding", "token_weights"
"""Names of a graph's outputs: vectors of texts, vectors of tokens, and weights of tokens."""

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Pooling fields of sentence-transformers before version 5.5, in the order in which several poolings are concatenated."""
READ, HARMLESS = "read", "harmless"
_EMPTY: tuple[Any, ...] = (None, {}, [])
_TENSORS = (None, "sentence_embedding", "token_embeddings")

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
        "max_active_dims": READ,
        # Settings that PyLate saves for multi-vector models.
        **dict.fromkeys(("query_prefix", "document_prefix", "query_length", "document_length"), READ),
        **dict.fromkeys(("query_expansion", "do_query_expansion"), READ),
        **dict.fromkeys(("attend_to_expansion_tokens", "attend_to_mask_tokens", "skiplist_words"), READ),
    },
    "Transformer": {
        "max_seq_length": READ,
        "do_lower_case": READ,
        "transformer_task": READ,
        "modality_config": READ,
        "module_output_name": (None, "token_embeddings", "scores", "causal_logits"),
        # Unpadding does not change the vectors. It only avoids computation for padding tokens.
        "unpad_inputs": HARMLESS,
        "processing_kwargs": _EMPTY,
        **dict.fromkeys(("query_length", "document_length", "query_expansion"), READ),
        "tokenizer_name_or_path": (None,),
        **dict.fromkeys(("model_args", "model_kwargs", "config_args", "config_kwargs"), READ),
        **dict.fromkeys(("tokenizer_args", "tokenizer_kwargs", "processor_kwargs"), READ),
    },
    "Pooling": {
        "word_embedding_dimension": HARMLESS,
        "embedding_dimension": HARMLESS,
        "pooling_mode": READ,
        **dict.fromkeys(POOLING_FLAGS, READ),
        "include_prompt": READ,
    },
    "Dense": {
        "in_features": HARMLESS,
        "out_features": HARMLESS,
        "bias": HARMLESS,
        "activation_function": READ,
        "module_input_name": _TENSORS,
        "module_output_name": _TENSORS,
        "use_residual": READ,
    },
    "LayerNorm": {"dimension": HARMLESS},
    "Normalize": {"module_input_name": _TENSORS, "module_output_name": _TENSORS},
    "Dropout": {"dropout": HARMLESS},
    "SpladePooling": {
        "pooling_strategy": ("max", "sum"),
        "activation_function": ("relu", "log1p_relu"),
        # A larger chunk size needs more memory and gives the same vectors.
        **dict.fromkeys(("word_embedding_dimension", "embedding_dimension", "chunk_size"), HARMLESS),
    },
    "SparseAutoEncoder": {
        "k": READ,
        "normalize": READ,
        # The other fields are for training, or follow from the weights.
        **dict.fromkeys(("input_dim", "hidden_dim", "k_aux", "dead_threshold"), HARMLESS),
    },
    "SparseStaticEmbedding": {"frozen": HARMLESS, "path": READ},
    "MultiVectorMask": {"skiplist_words": READ, "skiplist_tasks": READ, "keep_only_token_ids": READ},
    "LogitScore": {"true_token_id": READ, "false_token_id": READ, "module_input_name": (None, "causal_logits")},
}
"""Known fields, by file name or by module class. accel reads the field (`READ`), ignores it (`HARMLESS`), or accepts only
the values in a tuple and raises an error for other values.
"""


def check_fields(path: Path, values: Mapping[str, Any], supported: Mapping[str, str | tuple[Any, ...]]) -> None:
    """Raise for unknown fields and unsupported values."""
    for name, value in values.items():
        use = supported.get(name)
        if use is None or (isinstance(use, tuple) and not any(value == allowed for allowed in use)):
            raise ConfigError(
                f"{name} is {value!r:.100} in {path}. accel does not support this setting, so its results would differ from "
                "those of sentence-transformers.",
                fix="use sentence-transformers for this model, or remove the field if your results do not depend on it.",
            )


def number_field(path: Path, values: Mapping[str, Any], name: str) -> int | None:
    """Return a field that is a whole number above 0, or `None` if the field is missing.

    Raises:
        IntegrityError: The value is something else.
    """
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise IntegrityError(
            f"{name} is {value!r:.100} in {path}, but it must be a whole number above 0.", fix="correct the field."
        )
    return value


def output_of_side(side: str) -> str:
    """Return the name of the output with the vectors of the router's path for queries or documents."""
    return f"{side}_embedding"
