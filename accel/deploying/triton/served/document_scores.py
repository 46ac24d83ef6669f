"""Ranking of documents for a query with a cross-encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .text_batches import sigmoid
from .tokens import Array, GraphRow, InvalidRequestError, Tokens


class DocumentRanker:
    """Rank documents: `QUERY` and `DOCUMENTS` are the inputs, `SCORES` and `RANKING` the outputs.

    `RANKING` contains the indices of the documents, the best first.

    Args:
        settings: `function`: `sigmoid` or `none`; `prompt`: text that is put before each query; `lower`: whether texts are lowercased.
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
            raise InvalidRequestError("there are no documents")
        pairs = [(self._prompt + texts["QUERY"][0], text) for text in documents]
        if self._lower:
            pairs = [(query.lower(), text.lower()) for query, text in pairs]
        encodings = [self._tokens.encode(query, text, cut="longest_first")[0] for query, text in pairs]
        return None, [self._tokens.row(encoding) for encoding in encodings]

    def write(self, memory: None, outputs: Sequence[Mapping[str, Array]], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores in the order of the documents, and their ranking. Documents with equal scores keep their order."""
        scores = np.asarray([one["logits"][0] for one in outputs], dtype="float32")
        scores = sigmoid(scores) if self._function == "sigmoid" else scores
        return {"SCORES": scores, "RANKING": np.argsort(-scores, kind="stable")}
