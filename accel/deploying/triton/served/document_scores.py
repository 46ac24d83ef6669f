"""Ranking of documents for a query with a cross-encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .text_batches import sigmoid
from .tokens import Array, GraphRow, InvalidRequestError, Tokens


class DocumentRanker:
    """Service that ranks documents. Its inputs are `QUERY` and `DOCUMENTS`; its outputs are `SCORES` and `RANKING`.

    `RANKING` contains the indices of the documents, the best document first.

    Args:
        settings: `function` is `sigmoid` or `none`; `prompt` is put before each query; `lower` is true if texts are lowercased.
        tokens: The tokenizer.
    """

    options = ()

    def __init__(self, settings: Mapping[str, Any], tokens: Tokens) -> None:
        self._function: str = settings["function"]
        self._prompt: str = settings["prompt"]
        self._lower: bool = settings["lower"]
        self._tokens = tokens

    def read(self, texts: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> tuple[None, list[GraphRow]]:
        """Return one row for each document."""
        documents = texts["DOCUMENTS"]
        if not documents:
            raise InvalidRequestError("a request has no documents: DOCUMENTS is empty")
        pairs = [(self._prompt + texts["QUERY"][0], text) for text in documents]
        if self._lower:
            pairs = [(query.lower(), text.lower()) for query, text in pairs]
        encodings = [self._tokens.encode(query, text, cut="longest_first")[0] for query, text in pairs]
        return None, [self._tokens.row(encoding) for encoding in encodings]

    def write(self, memory: None, outputs: Sequence[Mapping[str, Array]], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores in the order of the documents, and their ranking. Documents with equal scores keep their order."""
        scores = np.asarray([output["logits"][0] for output in outputs], dtype="float32")
        scores = sigmoid(scores) if self._function == "sigmoid" else scores
        return {"SCORES": scores, "RANKING": np.argsort(-scores, kind="stable")}
