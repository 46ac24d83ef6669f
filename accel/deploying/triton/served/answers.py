"""Answers to questions, as spans of a context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .batches import option
from .tokens import Array, Refused, Row, Tokens


@dataclass(frozen=True)
class _Windows:
    """A context, and for each window where its tokens stand in it; `None` for tokens that are not of the context."""

    context: str
    offsets: Sequence[Sequence[tuple[int, int] | None]]


class Service:
    """`QUESTION` and `CONTEXT` to `ANSWER`, `SCORE`, `START` and `END`: `top_k` of each, characters of the context.

    Args:
        settings: `longest`: tokens of a window at most, where the request does not say it.
        tokens: Reads the texts.
    """

    options = ("top_k", "max_answer_len", "max_seq_len", "doc_stride", "handle_impossible_answer")

    def __init__(self, settings: Mapping[str, Any], tokens: Tokens) -> None:
        self._longest: int = settings["longest"]
        self._tokens = tokens

    def read(self, texts: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> tuple[_Windows, list[Row]]:
        """A row for each window of the context."""
        question, context = texts["QUESTION"][0], texts["CONTEXT"][0]
        for name, text in (("question", question), ("context", context)):
            if not text.strip():
                raise Refused(f"the {name} is empty")
        longest = option(options, "max_seq_len", self._longest, int)
        if self._tokens.max_length is not None:
            longest = min(longest, self._tokens.max_length)
        stride = option(options, "doc_stride", min(longest // 4, 128), int)
        windows = self._tokens.encode(question, context, cut="only_second", max_length=longest, stride=stride)
        offsets = [
            [place if side == 1 else None for place, side in zip(one.offsets, one.sequence_ids, strict=True)]
            for one in windows
        ]
        return _Windows(context, offsets), [self._tokens.row(one) for one in windows]

    def write(
        self, memory: _Windows, outputs: Sequence[Mapping[str, Array]], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The best spans over all windows; one that two windows hold counts once."""
        count = option(options, "top_k", 1, int)
        longest = option(options, "max_answer_len", 15, int)
        if count < 1 or longest < 1:
            raise Refused(f"top_k is {count} and max_answer_len {longest}; both are at least 1")
        best: dict[tuple[int, int], float] = {}
        impossible = 1.0
        for offsets, output in zip(memory.offsets, outputs, strict=True):
            inside = np.array([place is not None for place in offsets])
            start = self._probabilities(output["start_logits"], inside)
            end = self._probabilities(output["end_logits"], inside)
            impossible = min(impossible, float(start[0] * end[0]))
            scores = np.tril(np.triu(np.outer(start * inside, end * inside)), longest - 1)
            for flat in np.argsort(-scores, axis=None)[: count * 4]:
                first, last = np.unravel_index(flat, scores.shape)
                begins, ends = offsets[int(first)], offsets[int(last)]
                if scores[first, last] > 0 and begins is not None and ends is not None:
                    span = (int(begins[0]), int(ends[1]))
                    best[span] = max(best.get(span, 0.0), float(scores[first, last]))
        found = [(score, *span, memory.context[slice(*span)]) for span, score in best.items()]
        if option(options, "handle_impossible_answer", False, bool):
            found.append((impossible, 0, 0, ""))
        found = sorted(found, key=lambda one: -one[0])[:count]
        if not found:
            raise Refused("the context holds no tokens")
        score, start_of, end_of, answer = zip(*found, strict=True)
        return {"ANSWER": list(answer), "SCORE": list(score), "START": list(start_of), "END": list(end_of)}

    def _probabilities(self, logits: Array, inside: Array) -> Array:
        """Over the context and the first token, which stands for no answer."""
        own = self._tokens.unpadded(logits.astype("float32"), len(inside))
        keep = inside.copy()
        keep[0] = True
        weights = np.where(keep, np.exp(own - own[keep].max()), 0.0)
        result: Array = weights / weights.sum()
        return result
