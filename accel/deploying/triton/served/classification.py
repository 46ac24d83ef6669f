"""Classification of texts and of text pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .text_batches import option, sigmoid, softmax
from .tokens import Array, GraphRow, Tokens

_FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "none": lambda logits: logits,
}


class TextClassifier:
    """Service that classifies texts. Its inputs are `TEXT` and `TEXT_PAIR`; its outputs are `LABEL`, `SCORE` and `SCORES`.

    Args:
        settings: `labels` in the order of the logits, and `function`: `softmax`, `sigmoid` or `none`.
        tokens: The tokenizer.
    """

    options = ("function_to_apply", "truncation")

    def __init__(self, settings: Mapping[str, Any], tokens: Tokens) -> None:
        self._labels: Sequence[str] = settings["labels"]
        self._function: str = settings["function"]
        self._tokens = tokens

    def read(self, texts: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> tuple[None, list[GraphRow]]:
        """Return one row for a text or a text pair."""
        pair = texts["TEXT_PAIR"][0] if "TEXT_PAIR" in texts else None
        cut = "longest_first" if option(options, "truncation", False, bool) else None
        return None, [self._tokens.row(self._tokens.encode(texts["TEXT"][0], pair, cut=cut)[0])]

    def write(self, memory: None, outputs: Sequence[Mapping[str, Array]], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the most likely label, its score, and the scores of all labels."""
        function = _FUNCTIONS[option(options, "function_to_apply", self._function, tuple(_FUNCTIONS))]
        scores = function(outputs[0]["logits"].astype("float32"))
        best = int(scores.argmax())
        return {"LABEL": [self._labels[best]], "SCORE": [scores[best]], "SCORES": scores}
