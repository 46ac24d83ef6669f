"""Embeddings of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .batches import option
from .tokens import Array, Row, Tokens


class Service:
    """`TEXT` to `EMBEDDING`.

    Args:
        settings: `output`, which the graph has pooled, or the hidden states to average; `pooled`; the `prompt` before each
            text; and whether texts are made `lower` case.
        tokens: Reads the texts.
    """

    options = ("normalize",)

    def __init__(self, settings: Mapping[str, Any], tokens: Tokens) -> None:
        self._output: str = settings["output"]
        self._pooled: bool = settings["pooled"]
        self._prompt: str = settings["prompt"]
        self._lower: bool = settings["lower"]
        self._tokens = tokens

    def read(self, texts: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> tuple[Row, list[Row]]:
        """One row for a text."""
        text = self._prompt + texts["TEXT"][0]
        row = self._tokens.row(self._tokens.encode(text.lower() if self._lower else text, cut="longest_first")[0])
        return row, [row]

    def write(self, memory: Row, outputs: Sequence[Mapping[str, Array]], options: Mapping[str, Any]) -> dict[str, Any]:
        """Its embedding, of length 1 where that is asked for."""
        found = outputs[0][self._output].astype("float32")
        if not self._pooled:
            mask = np.asarray(memory.values["attention_mask"], dtype="float32")[:, None]
            found = (self._tokens.unpadded(found, memory.length) * mask).sum(0) / max(mask.sum(), 1.0)
        if option(options, "normalize", False, bool):
            found = found / max(float(np.linalg.norm(found)), 1e-12)
        return {"EMBEDDING": found}
