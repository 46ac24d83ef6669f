"""Computation of embeddings of texts, with the options of sentence-transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, get_args

import numpy as np
import torch

from ..config import check_number, check_type
from ..errors import ConfigError, InputError, TaskError, did_you_mean
from .embedding_and_scoring import DENSE, MULTI_VECTOR, SPARSE, Embedder, in_batches
from .vector_functions import Precision, quantize_embeddings


class EncodeOptions(TypedDict, total=False):
    """Options of `encode`, `encode_query` and `encode_document`.

    Attributes:
        batch_size: Number of texts per batch; 32 by default.
        tokenizer: The tokenizer; the artifact's own by default.
        outputs: Kinds of embeddings to return: some of `dense`, `sparse` and `multi_vector`. The result is then a dict. The model computes
            all kinds in one pass. By default, the model's main kind is returned, without a dict.
        convert_to_numpy: Return NumPy arrays instead of torch tensors. By default, true for dense embeddings.
        normalize_embeddings: Normalize each dense embedding to length 1, after `truncate_dim`, and each vector of a multi-vector embedding.
        prompt_name: Name of a prompt in the model's files; the model's default prompt by default.
        prompt: Text to put before each text, instead of a named prompt.
        truncate_dim: Number of leading dimensions of dense embeddings; the number in the model's files by default.
        precision: `float32`, or a type of dense embeddings that `quantize_embeddings` describes.
        ranges: Smallest and largest value of each dimension `(2, size)` for the precisions `int8` and `uint8`; computed from the texts of
            the call by default.
        max_active_dims: Largest number of dimensions of a sparse embedding that are not zero; the number in the model's files by default.
    """

    batch_size: int
    tokenizer: Any
    outputs: Sequence[str] | None
    convert_to_numpy: bool | None
    normalize_embeddings: bool
    prompt_name: str | None
    prompt: str | None
    truncate_dim: int | None
    precision: Precision
    ranges: np.ndarray[Any, Any] | None
    max_active_dims: int | None


def encode(
    model: Any, texts: str | Sequence[str], side: str, options: EncodeOptions, *, default_prompt: bool = False
) -> Any:
    """Compute embeddings of texts; see `ORTModelForFeatureExtraction.encode`.

    Args:
        model: An `ORTModelForFeatureExtraction`.
        texts: One text or several.
        side: `query`, `document` or empty.
        options: The options.
        default_prompt: Whether the prompt of the side is used, if the options contain none.
    """
    single = isinstance(texts, str)
    items = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else [texts]
    if not all(isinstance(item, str) for item in items):
        kinds = sorted({type(item).__name__ for item in items if not isinstance(item, str)})
        raise InputError(
            f"encode was called with values of type {', '.join(kinds)}, but it accepts only strings.",
            fix="pass a string or a list of strings.",
        )
    if unknown := sorted(set(options) - set(EncodeOptions.__annotations__)):
        raise ConfigError(
            f"encode has no option {unknown[0]!r}.{did_you_mean(unknown[0], EncodeOptions.__annotations__)}",
            fix=f"use only {', '.join(EncodeOptions.__annotations__)}.",
        )
    if side not in ("", "query", "document"):
        raise ConfigError(f"side is {side!r}.", fix="pass 'query', 'document', or leave side out.")
    embedder = Embedder(model, options.get("tokenizer"))
    names = _outputs(embedder, options.get("outputs"))
    size, active, precision = (
        options.get("truncate_dim"),
        options.get("max_active_dims"),
        options.get("precision", "float32"),
    )
    for name, number in (("truncate_dim", size), ("max_active_dims", active)):
        if number is not None:
            check_type(name, number, (int,))
            check_number(name, number, 1)
    _check_precision(precision, names)
    as_numpy = options.get("convert_to_numpy")
    if as_numpy and SPARSE in names:
        raise ConfigError(
            "convert_to_numpy=True was passed, but sparse embeddings are sparse torch tensors.",
            fix="leave convert_to_numpy out. `embeddings.to_dense().numpy()` returns an array with all zeros.",
        )
    prompt, prompt_name = options.get("prompt"), options.get("prompt_name")
    if prompt is None:
        if prompt_name is None and default_prompt:
            prompt_name = embedder.settings.default_prompt_of(side)
        prompt = embedder.settings.prompt(prompt_name)

    def compute(part: list[str]) -> list[dict[str, torch.Tensor]]:
        rows = embedder.rows(part, prompt=prompt, side=side)
        return embedder.embeddings(rows, names, side=side, size=size, max_active_dims=active)

    computed = in_batches(items, len, options.get("batch_size", 32), compute)
    normalize = options.get("normalize_embeddings", False)
    results: dict[str, Any] = {}
    for name in names:
        values = [row[name] for row in computed]
        if name == SPARSE:
            result: Any = torch.stack(values).coalesce() if values else torch.empty(0, 0).to_sparse()
        elif name == MULTI_VECTOR:
            vectors = [torch.nn.functional.normalize(value, dim=-1) for value in values] if normalize else values
            result = [value.cpu().numpy() for value in vectors] if as_numpy else vectors
        else:
            result = torch.stack(values) if values else torch.empty(0, 0)
            result = torch.nn.functional.normalize(result, dim=-1) if normalize else result
            if precision != "float32" and values:
                result = torch.from_numpy(quantize_embeddings(result, precision, ranges=options.get("ranges")))
            result = result if as_numpy is False else result.cpu().numpy()
        results[name] = result[0] if single else result
    return results if options.get("outputs") is not None else results[names[0]]


def _outputs(embedder: Embedder, outputs: Sequence[str] | None) -> tuple[str, ...]:
    """Return the kinds of embeddings of a call.

    Raises:
        TaskError: The model does not compute a kind.
        ConfigError: The kinds are not a list of names.
    """
    if outputs is None:
        return embedder.offers[:1]
    names = (DENSE, SPARSE, MULTI_VECTOR)
    if isinstance(outputs, str) or not outputs or not set(outputs) <= set(names):
        raise ConfigError(f"outputs is {outputs!r}.", fix=f"pass a list with some of {', '.join(names)}.")
    if missing := [name for name in outputs if name not in embedder.offers]:
        raise TaskError(
            f"The model in {embedder.settings.folder} does not compute {', '.join(missing)} embeddings. It computes "
            f"{', '.join(embedder.offers)} embeddings.",
            fix=f"pass outputs={list(embedder.offers)}, or leave outputs out.",
        )
    return tuple(outputs)


def _check_precision(precision: str, names: Sequence[str]) -> None:
    if precision not in get_args(Precision):
        raise ConfigError(
            f"precision is {precision!r}.{did_you_mean(str(precision), get_args(Precision))}",
            fix=f"use one of {', '.join(get_args(Precision))}.",
        )
    if precision != "float32" and DENSE not in names:
        raise ConfigError(
            f"precision is {precision!r}, which applies only to dense embeddings, but the call returns {', '.join(names)} embeddings.",
            fix="leave precision out. accel.quantize_embeddings converts the vectors of multi-vector embeddings.",
        )
