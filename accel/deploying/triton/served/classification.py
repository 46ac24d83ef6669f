"""Labels of texts and of pairs of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .text_batches import option, sigmoid, softmax
from .tokens import Array, GraphRow, Tokens


def _same(logits: Array) -> Array:
    return logits


_FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {"softmax": softmax, "sigmoid": sigmoid, "none": _same}


class Service:
    """`TEXT`, `TEXT_PAIR` to `LABEL`, `SCORE` and `SCORES`.

    Args:
        settings: `labels` in the order of the outputs, and `function`: `softmax`, `sigmoid` or `none`.
        tokens: Reads the texts.
    """

    options = ("function_to_apply", "truncation")

    def __init__(self, settings: Mapping[str, Any], tokens: Tokens) -> None:
        self._labels: Sequence[str] = settings["labels"]
        self._function: str = settings["function"]
        self._tokens = tokens

    def read(self, texts: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> tuple[None, list[GraphRow]]:
        """One row for a text or a pair."""
        pair = texts["TEXT_PAIR"][0] if "TEXT_PAIR" in texts else None
        cut = "longest_first" if option(options, "truncation", False, bool) else None
        return None, [self._tokens.row(self._tokens.encode(texts["TEXT"][0], pair, cut=cut)[0])]

    def write(self, memory: None, outputs: Sequence[Mapping[str, Array]], options: Mapping[str, Any]) -> dict[str, Any]:
        """The likeliest label, its score and all scores."""
        function = _FUNCTIONS[option(options, "function_to_apply", self._function, tuple(_FUNCTIONS))]
        scores = function(outputs[0]["logits"].astype("float32"))
        best = int(scores.argmax())
        return {"LABEL": [self._labels[best]], "SCORE": [scores[best]], "SCORES": scores}
