"""Text embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .text_batches import option
from .tokens import Array, GraphRow, Tokens


class TextEmbedder:
    """Service that computes embeddings of texts. Its input is `TEXT`; its output is `EMBEDDING`.

    Args:
        settings: `output` is the name of the graph's output, and `pooled` is true if this output is already one vector per text. Otherwise
            the service pools the hidden states with `modes`, without the first `excluded` tokens, and scales the vectors to length 1 if
            `normalize` is true. `prompt` is put before each text, texts are lowercased if `lower` is true, and `size` is the size of an
            embedding.
        tokens: The tokenizer.
    """

    options = ("normalize",)

    def __init__(self, settings: Mapping[str, Any], tokens: Tokens) -> None:
        self._settings = settings
        self._output: str = settings["output"]
        self._tokens = tokens

    def read(self, texts: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> tuple[GraphRow, list[GraphRow]]:
        """Return one row for a text."""
        text = self._settings["prompt"] + texts["TEXT"][0]
        text = text.lower() if self._settings["lower"] else text
        row = self._tokens.row(self._tokens.encode(text, cut="longest_first")[0])
        return row, [row]

    def write(
        self, memory: GraphRow, outputs: Sequence[Mapping[str, Array]], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the embedding of the text, scaled to length 1 if the request has the option `normalize`."""
        vector = outputs[0][self._output].astype("float32")
        if not self._settings["pooled"]:
            hidden = self._tokens.unpadded(vector, memory.length)
            vector = pool(hidden, self._settings["modes"], self._settings["excluded"])
            vector = _normalized(vector) if self._settings["normalize"] else vector
        vector = vector[: self._settings["size"]]
        return {"EMBEDDING": _normalized(vector) if option(options, "normalize", False, bool) else vector}


def pool(hidden: Array, modes: Sequence[str], excluded: int) -> Array:
    """Pool the hidden states of a text, `(tokens, hidden)` float32, without the first `excluded` tokens."""
    # If the prompt fills the whole row, no tokens remain after it: pool zeros.
    states = hidden[excluded:] if excluded < len(hidden) else np.zeros_like(hidden[:1])
    weights = np.arange(excluded + 1, excluded + 1 + len(states), dtype="float32")[:, None]
    pooled = {
        "cls": lambda: states[0],
        "lasttoken": lambda: states[-1],
        "max": lambda: states.max(0),
        "mean": lambda: states.mean(0),
        "mean_sqrt_len_tokens": lambda: states.sum(0) / np.sqrt(len(states)),
        "weightedmean": lambda: (states * weights).sum(0) / weights.sum(),
    }
    return np.concatenate([pooled[mode]() for mode in modes]).astype("float32")


def _normalized(vector: Array) -> Array:
    unit: Array = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return unit
