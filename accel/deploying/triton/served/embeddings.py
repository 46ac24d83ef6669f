"""Embeddings of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .text_batches import option
from .tokens import Array, GraphRow, Tokens


class Service:
    """`TEXT` to `EMBEDDING`.

    Args:
        settings: `output`, which the graph has `pooled`, or the hidden states to pool by `modes` without the first `excluded` tokens,
            and to `normalize`; the `prompt` before each text; whether texts are made `lower` case; and the `size` of an embedding.
        tokens: Reads the texts.
    """

    options = ("normalize",)

    def __init__(self, settings: Mapping[str, Any], tokens: Tokens) -> None:
        self._settings = settings
        self._output: str = settings["output"]
        self._tokens = tokens

    def read(self, texts: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> tuple[GraphRow, list[GraphRow]]:
        """One row for a text."""
        text = self._settings["prompt"] + texts["TEXT"][0]
        text = text.lower() if self._settings["lower"] else text
        row = self._tokens.row(self._tokens.encode(text, cut="longest_first")[0])
        return row, [row]

    def write(
        self, memory: GraphRow, outputs: Sequence[Mapping[str, Array]], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Its embedding, of length 1 where that is asked for."""
        found = outputs[0][self._output].astype("float32")
        if not self._settings["pooled"]:
            hidden = self._tokens.unpadded(found, memory.length)
            found = pool(hidden, self._settings["modes"], self._settings["excluded"])
            found = _normalized(found) if self._settings["normalize"] else found
        found = found[: self._settings["size"]]
        return {"EMBEDDING": _normalized(found) if option(options, "normalize", False, bool) else found}


def pool(hidden: Array, modes: Sequence[str], excluded: int) -> Array:
    """One vector of the hidden states of a text's own tokens, `(tokens, hidden)` float32, without the first ones."""
    # A prompt that leaves no room for the text: there is nothing to pool.
    kept = hidden[excluded:] if excluded < len(hidden) else np.zeros_like(hidden[:1])
    weights = np.arange(excluded + 1, excluded + 1 + len(kept), dtype="float32")[:, None]
    pooled = {
        "cls": lambda: kept[0],
        "lasttoken": lambda: kept[-1],
        "max": lambda: kept.max(0),
        "mean": lambda: kept.mean(0),
        "mean_sqrt_len_tokens": lambda: kept.sum(0) / np.sqrt(len(kept)),
        "weightedmean": lambda: (kept * weights).sum(0) / weights.sum(),
    }
    return np.concatenate([pooled[mode]() for mode in modes]).astype("float32")


def _normalized(vector: Array) -> Array:
    found: Array = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return found
