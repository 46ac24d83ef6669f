"""Replacement of fastembed's classes that embed texts, with accel models. Only the import line of a script changes.

A model name is a Hub id or a folder: an artifact, or a model of transformers, sentence-transformers or PyLate, which is exported once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ..config import SessionOptions
from ..errors import ConfigError

Array = np.ndarray[Any, Any]


@dataclass
class SparseEmbedding:
    """Sparse embedding of a text, with the fields of fastembed's class.

    Attributes:
        values: Weights of tokens, `(tokens,)` float32.
        indices: Token ids in increasing order, `(tokens,)` int64.
    """

    values: Array
    indices: Array

    def as_object(self) -> dict[str, Array]:
        """Return the fields as a dict."""
        return {"values": self.values, "indices": self.indices}

    def as_dict(self) -> dict[int, float]:
        """Return the weights by token id."""
        return dict(zip(self.indices.tolist(), self.values.tolist(), strict=True))


class _Embedding:
    """Base class of the embedding classes.

    Args:
        model_name: Hub id or folder.
        cache_dir: Folder for downloaded models.
        threads: Number of threads; all available processors when `None`.
        providers: Providers of ONNX Runtime, in the order of preference.
        **settings: More arguments of `ORTModelForFeatureExtraction.from_pretrained`, such as `backend` and `device`.

    Raises:
        AccelError: The model cannot be loaded.
    """

    _kind: str

    def __init__(
        self,
        model_name: str,
        cache_dir: str | None = None,
        threads: int | None = None,
        providers: Sequence[Any] | None = None,
        **settings: Any,
    ) -> None:
        from accel import ORTModelForFeatureExtraction

        if providers is not None:
            settings["providers"] = providers
        settings.setdefault("session_options", SessionOptions(threads=threads))
        self.model_name = model_name
        self.model = ORTModelForFeatureExtraction.from_pretrained(model_name, cache_dir=cache_dir, **settings)

    def embed(
        self, documents: str | Iterable[str], batch_size: int = 256, parallel: int | None = None, **options: Any
    ) -> Iterator[Any]:
        """Yield the embedding of each document, in the order of the documents.

        Args:
            documents: A text or texts.
            batch_size: Number of texts per batch.
            parallel: Only `None`: all threads compute the same batch.
            **options: Options of `encode`.

        Raises:
            ConfigError: `parallel` is a number of processes.
            TaskError: The model does not compute embeddings of this class.
        """
        return self._embedded(self.model.encode_document, documents, batch_size, parallel, options)

    def passage_embed(self, texts: Iterable[str], **options: Any) -> Iterator[Any]:
        """Yield the embedding of each passage; see `embed`."""
        return self.embed(texts, **options)

    def query_embed(self, query: str | Iterable[str], batch_size: int = 256, **options: Any) -> Iterator[Any]:
        """Yield the embedding of each query; see `embed`."""
        return self._embedded(self.model.encode_query, query, batch_size, None, options)

    def _embedded(
        self, encode: Any, texts: str | Iterable[str], batch_size: int, parallel: int | None, options: dict[str, Any]
    ) -> Iterator[Any]:
        if parallel is not None:
            raise ConfigError(
                f"parallel is {parallel}, but accel computes all batches in this process.",
                fix="leave parallel out, and use `accel batch` to embed large collections.",
            )
        remaining = iter([texts] if isinstance(texts, str) else texts)
        while part := list(islice(remaining, batch_size)):
            results = encode(part, batch_size=batch_size, outputs=[self._kind], **options)
            yield from self._results(results[self._kind])

    def _results(self, embeddings: Any) -> Iterable[Any]:
        return [np.asarray(embedding) for embedding in embeddings]


class TextEmbedding(_Embedding):
    """fastembed's `TextEmbedding`: one vector per text, `(size,)` float32."""

    _kind = "dense"

    @property
    def embedding_size(self) -> int:
        """Number of dimensions of the embeddings. Embeds a short text to determine the number."""
        return len(next(self.embed("a")))


class SparseTextEmbedding(_Embedding):
    """fastembed's `SparseTextEmbedding`: a `SparseEmbedding` per text."""

    _kind = "sparse"

    def _results(self, embeddings: Any) -> Iterable[SparseEmbedding]:
        rows = [embedding.coalesce().cpu() for embedding in embeddings]
        return [SparseEmbedding(values=row.values().numpy(), indices=row.indices()[0].numpy()) for row in rows]


class LateInteractionTextEmbedding(_Embedding):
    """fastembed's `LateInteractionTextEmbedding`: one vector per token, `(tokens, size)` float32 per text."""

    _kind = "multi_vector"
