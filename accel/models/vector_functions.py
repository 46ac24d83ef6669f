"""Functions on embeddings: similarity of two collections, late interaction (MaxSim), and conversion to integers or bits.

The results equal those of sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from ..config import check_number, check_type
from ..errors import ConfigError, InputError, did_you_mean

Vectors: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | Sequence[torch.Tensor] | Sequence[np.ndarray[Any, Any]]
"""Embeddings of one text or of several texts. For multi-vector models, each embedding is a matrix `(tokens, size)`."""
Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]

_EMPTY_DOCUMENT = -1e9
_BUDGET = 25_000_000
"""Largest number of float32 values that are computed at once (100 MB)."""
_STEPS = 255


def similarity(name: str, first: Vectors, second: Vectors) -> torch.Tensor:
    """Return the similarity of each embedding in `first` to each embedding in `second`, `(len(first), len(second))` float32.

    Args:
        name: `cosine`, `dot`, `euclidean` or `manhattan` (both are negative distances), or `maxsim` or `meanmaxsim` for multi-vector
            embeddings.
        first: Embeddings, dense or as a sparse tensor.
        second: Embeddings with the same number of dimensions.

    Raises:
        ConfigError: There is no similarity with this name.
        InputError: The embeddings have different numbers of dimensions.
    """
    if name in ("maxsim", "meanmaxsim"):
        return maxsim(first, second, mean=name == "meanmaxsim")
    if name not in _SIMILARITY:
        names = [*_SIMILARITY, "maxsim", "meanmaxsim"]
        raise ConfigError(
            f"There is no similarity {name!r}.{did_you_mean(name, names)}", fix=f"use one of {', '.join(names)}."
        )
    a, b = _rows(first), _rows(second)
    if a.shape[1] != b.shape[1]:
        raise InputError(
            f"The embeddings have {a.shape[1]} and {b.shape[1]} dimensions, so they cannot be compared.",
            fix="compute both collections with the same model, and pass the same truncate_dim.",
        )
    if a.is_sparse and b.is_sparse and name in ("cosine", "dot"):
        # A product of two sparse tensors logs a warning in torch, so some rows at a time are made dense.
        step = max(_BUDGET // b.shape[1], 1)
        parts = [torch.arange(i, min(i + step, len(b)), device=b.device) for i in range(0, len(b), step)]
        columns = [torch.sparse.mm(a, b.index_select(0, part).to_dense().T) for part in parts]
        products = torch.cat(columns, dim=1) if columns else torch.zeros(len(a), 0)
        if name == "dot":
            return products
        lengths = [torch.sparse.sum(rows * rows, dim=1).to_dense().sqrt().clamp(min=1e-12) for rows in (a, b)]
        return products / (lengths[0][:, None] * lengths[1][None])
    # Other distances of sparse tensors are computed in dense form.
    return _SIMILARITY[name](*(rows.to_dense() if rows.is_sparse else rows for rows in (a, b)))


def maxsim(
    queries: Vectors, documents: Vectors, *, mean: bool = False, device: str | torch.device | None = None
) -> torch.Tensor:
    """Return the late interaction score of each query and document, `(queries, documents)` float32.

    The score is the sum, over the tokens of the query, of the largest scalar product with a token of the document. Documents without
    tokens have the score -1e9. Queries and documents are padded and computed in batches that need at most about 100 MB.

    Args:
        queries: Matrices `(tokens, size)` of several queries, one matrix of a single query, or a tensor `(queries, tokens, size)`.
        documents: Matrices of documents.
        mean: Whether each score is divided by the number of tokens of the query.
        device: Device of the computation; the device of the documents when `None`. The scores are on the device of the documents.

    Raises:
        InputError: An embedding is not a matrix, or the numbers of dimensions differ.
    """
    left, right = _matrices("queries", queries), _matrices("documents", documents)
    if not left or not right:
        return torch.zeros(len(left), len(right))
    sizes = {matrix.shape[1] for matrix in (*left, *right)}
    if len(sizes) > 1:
        raise InputError(
            f"The vectors of the tokens have different numbers of dimensions: {sorted(sizes)}.",
            fix="compute queries and documents with the same model.",
        )
    home = right[0].device
    target = torch.device(device) if device is not None else home
    scores = torch.empty(len(left), len(right), device=home)
    for some_queries in _groups([len(matrix) for matrix in left], max(len(matrix) for matrix in right)):
        tokens = torch.cat([left[i].to(target).float() for i in some_queries])
        owners = torch.repeat_interleave(torch.tensor([len(left[i]) for i in some_queries])).to(target)
        for some_documents in _groups([len(matrix) for matrix in right], len(tokens)):
            best = _best_products(tokens, [right[i].to(target).float() for i in some_documents])
            sums = torch.zeros(len(some_queries), len(some_documents), device=target).index_add_(0, owners, best)
            scores[torch.tensor(some_queries)[:, None], torch.tensor(some_documents)[None]] = sums.to(home)
    scores[:, [i for i, matrix in enumerate(right) if not len(matrix)]] = _EMPTY_DOCUMENT
    if mean:
        scores /= torch.tensor([max(len(matrix), 1) for matrix in left], device=home)[:, None]
    return scores


def quantize_embeddings(
    embeddings: Vectors,
    precision: Precision,
    *,
    ranges: np.ndarray[Any, Any] | None = None,
    calibration_embeddings: np.ndarray[Any, Any] | None = None,
) -> Any:
    """Convert float32 embeddings to integers or bits, which need 4 to 32 times less memory in an index.

    Args:
        embeddings: Embeddings `(texts, size)`, or matrices `(tokens, size)` of a multi-vector model.
        precision: `int8` and `uint8` divide the range of each dimension into 256 steps. `binary` and `ubinary` store the sign of each
            dimension as one bit, in `(size + 7) // 8` bytes of int8 or uint8.
        ranges: Smallest and largest value of each dimension, `(2, size)`, for `int8` and `uint8`. Values outside of the range become
            the first or last step.
        calibration_embeddings: Embeddings of other texts `(texts, size)`, from which the ranges are computed if `ranges` is `None`. By
            default, the ranges are computed from `embeddings`. Use the same ranges for queries and documents.

    Returns:
        A NumPy array, or a list of arrays for a list of matrices.

    Raises:
        ConfigError: The precision is unknown, or `ranges` has another shape.
        InputError: The ranges cannot be computed, because there is only one embedding.
    """
    if precision not in get_args(Precision):
        raise ConfigError(
            f"precision is {precision!r}.{did_you_mean(str(precision), get_args(Precision))}",
            fix=f"use one of {', '.join(get_args(Precision))}.",
        )
    if isinstance(embeddings, list | tuple) and len(embeddings) and embeddings[0].ndim == 2:
        arrays = [_array(matrix) for matrix in embeddings]
        if precision in ("int8", "uint8") and ranges is None:
            ranges = _ranges(np.concatenate(arrays), calibration_embeddings)
        return [quantize_embeddings(array, precision, ranges=ranges) for array in arrays]
    array = (
        np.stack([_array(row) for row in embeddings]) if isinstance(embeddings, list | tuple) else _array(embeddings)
    )
    if precision == "float32":
        return array.astype(np.float32, copy=False)
    if precision in ("binary", "ubinary"):
        bits = np.packbits(array > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    limits = np.asarray(_ranges(array, calibration_embeddings) if ranges is None else ranges, np.float32)
    if limits.shape != (2, array.shape[-1]):
        raise ConfigError(
            f"ranges has the shape {limits.shape}, but the embeddings have {array.shape[-1]} dimensions.",
            fix=f"pass an array of the shape (2, {array.shape[-1]}): the smallest and the largest value of each dimension.",
        )
    steps = (limits[1] - limits[0]) / _STEPS
    levels = np.clip(np.floor((array - limits[0]) / np.where(steps == 0, 1, steps)), 0, _STEPS)
    return levels.astype(np.uint8) if precision == "uint8" else (levels - 128).astype(np.int8)


def _ranges(array: np.ndarray[Any, Any], calibration_embeddings: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    """Return the smallest and largest value of each dimension."""
    values = np.asarray(array if calibration_embeddings is None else calibration_embeddings)
    if values.ndim != 2 or len(values) < 2:
        raise InputError(
            "The ranges of int8 or uint8 embeddings cannot be computed from a single embedding: every dimension would have only one value.",
            fix="pass ranges=..., the smallest and largest value of each dimension over many texts: np.stack([x.min(0), x.max(0)]).",
        )
    return np.stack([values.min(axis=0), values.max(axis=0)])


def _best_products(tokens: torch.Tensor, documents: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest scalar product of each query token with a token of each document, `(tokens, documents)`."""
    padded = torch.nn.utils.rnn.pad_sequence(list(documents), batch_first=True)
    if not padded.shape[1]:
        return tokens.new_zeros(len(tokens), len(documents))
    products = (tokens @ padded.flatten(0, 1).T).view(len(tokens), *padded.shape[:2])
    lengths = torch.tensor([len(matrix) for matrix in documents], device=tokens.device)
    padding = torch.arange(padded.shape[1], device=tokens.device)[None] >= lengths[:, None]
    best: torch.Tensor = products.masked_fill_(padding[None], torch.finfo(products.dtype).min).amax(-1)
    return best.masked_fill((lengths == 0)[None], 0.0)


def _groups(lengths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yield indices of items of similar length, so that a padded group and `width` other tokens fit into the budget."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and (len(group) + 1) * lengths[i] * max(width, 1) > _BUDGET:
            yield group
            group = []
        group.append(i)
    yield group


def _matrices(name: str, vectors: Any) -> list[torch.Tensor]:
    if isinstance(vectors, torch.Tensor | np.ndarray) and vectors.ndim == 2:
        vectors = [vectors]
    matrices = [torch.as_tensor(matrix) for matrix in vectors]
    wrong = next((matrix for matrix in matrices if matrix.ndim != 2), None)
    if wrong is not None:
        raise InputError(
            f"The {name} contain an embedding of the shape {tuple(wrong.shape)}, but MaxSim needs one vector per token.",
            fix="pass the embeddings of a multi-vector model: a list of tensors of the shape (tokens, size).",
        )
    return matrices


def _rows(vectors: Any) -> torch.Tensor:
    many = isinstance(vectors, list | tuple)
    rows = torch.stack([torch.as_tensor(row) for row in vectors]) if many else torch.as_tensor(vectors)
    rows = rows.unsqueeze(0) if rows.ndim == 1 else rows
    return rows.coalesce() if rows.is_sparse else rows


def _array(vectors: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.asarray(vectors.cpu() if isinstance(vectors, torch.Tensor) else vectors)
    if not np.issubdtype(array.dtype, np.floating):
        raise InputError(
            f"The embeddings have the dtype {array.dtype}, but only floating-point embeddings can be converted.",
            fix="compute the embeddings with precision='float32'.",
        )
    return array


def _cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(a, dim=1) @ torch.nn.functional.normalize(b, dim=1).T


_SIMILARITY: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cosine": _cosine,
    "dot": lambda a, b: a @ b.T,
    "euclidean": lambda a, b: -torch.cdist(a, b),
    "manhattan": lambda a, b: -torch.cdist(a, b, p=1.0),
}


def truncated(vectors: torch.Tensor, size: int | None) -> torch.Tensor:
    """Return the leading dimensions of vectors `(texts, size)`.

    Raises:
        ConfigError: `size` is not a whole number from 1.
        InputError: The vectors have fewer dimensions.
    """
    if size is None:
        return vectors
    check_type("truncate_dim", size, (int,))
    check_number("truncate_dim", size, 1)
    if size > vectors.shape[-1]:
        raise InputError(
            f"truncate_dim is {size}, but the embeddings of the model have only {vectors.shape[-1]} dimensions.",
            fix=f"pass at most {vectors.shape[-1]}.",
        )
    return vectors[..., :size]
