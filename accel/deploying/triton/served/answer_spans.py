"""Question answering: find the answers as spans of a context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .text_batches import option
from .tokens import Array, GraphRow, InvalidRequestError, Tokens


@dataclass(frozen=True)
class _Windows:
    """A context, and the encoding of each of its windows together with the question."""

    context: str
    encodings: Sequence[Any]


class QuestionAnswerer:
    """Service that answers questions from a context.

    The inputs are `QUESTION` and `CONTEXT`. The outputs are `ANSWER`, `SCORE`, `START` and `END`, each with `top_k` values. `START` and
    `END` are character positions in the context.

    Args:
        settings: `longest` is the maximum number of tokens in a window if the request has no `max_seq_len`; `no_answer` is the id of the
            token that means "no answer".
        tokens: The tokenizer.
    """

    options = ("top_k", "max_answer_len", "max_seq_len", "doc_stride", "handle_impossible_answer", "align_to_words")

    def __init__(self, settings: Mapping[str, Any], tokens: Tokens) -> None:
        self._longest: int = settings["longest"]
        self._no_answer: int | None = settings["no_answer"]
        self._tokens = tokens

    def read(self, texts: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> tuple[_Windows, list[GraphRow]]:
        """Return one row for each window of the context. If rows are padded on the left, the context comes before the question."""
        question, context = texts["QUESTION"][0], texts["CONTEXT"][0]
        for name, text in (("question", question), ("context", context)):
            if not text.strip():
                raise InvalidRequestError(f"the {name} of a request is empty")
        longest = option(options, "max_seq_len", self._longest, int)
        if self._tokens.max_length is not None:
            longest = min(longest, self._tokens.max_length)
        stride = option(options, "doc_stride", min(longest // 2, 128), int)
        pair, cut = ((context, question), "only_first") if self._tokens.left else ((question, context), "only_second")
        windows = self._tokens.encode(*pair, cut=cut, max_length=longest, stride=stride)
        return _Windows(context, windows), [self._tokens.row(window) for window in windows]

    def write(
        self, memory: _Windows, outputs: Sequence[Mapping[str, Array]], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the best answers of all windows. Scores of equal answers are added, as in transformers' pipeline."""
        count = option(options, "top_k", 1, int)
        longest = option(options, "max_answer_len", 15, int)
        whole_words = option(options, "align_to_words", True, bool)
        if count < 1 or longest < 1:
            raise InvalidRequestError(f"top_k is {count} and max_answer_len is {longest}, but both must be at least 1")
        spans = count * 2 + 10 if whole_words else count
        side = 0 if self._tokens.left else 1
        answers: dict[str, tuple[Any, ...]] = {}
        impossible = 1.0
        for encoding, output in zip(memory.encodings, outputs, strict=True):
            inside = np.array([sequence == side for sequence in encoding.sequence_ids])
            no_answer = np.array(encoding.ids) == self._no_answer
            start = self._probabilities(output["start_logits"], inside | no_answer)
            end = self._probabilities(output["end_logits"], inside | no_answer)
            impossible = min(impossible, float((start * end)[no_answer].max(initial=0.0)))
            scores = np.tril(np.triu(np.outer(start * inside, end * inside)), longest - 1)
            for flat in _largest(scores, spans):
                first, last = (int(position) for position in np.unravel_index(flat, scores.shape))
                if scores[first, last] <= 0:
                    continue
                begins, ends = _characters(encoding, first, last, side, whole_words)
                text = memory.context[begins:ends]
                summed, *span = answers.get(text.lower(), (0.0, begins, ends, text))
                answers[text.lower()] = (summed + float(scores[first, last]), *span)
        ranked = list(answers.values())
        if option(options, "handle_impossible_answer", False, bool):
            ranked.append((impossible, 0, 0, ""))
        ranked = sorted(ranked, key=lambda answer: -answer[0])[:count]
        if not ranked:
            raise InvalidRequestError("the context of a request has no tokens, so there is no answer")
        score, start_of, end_of, answer = zip(*ranked, strict=True)
        return {"ANSWER": list(answer), "SCORE": list(score), "START": list(start_of), "END": list(end_of)}

    def _probabilities(self, logits: Array, keep: Array) -> Array:
        """Return the probabilities of the tokens in `keep` (context tokens and the "no answer" token); other tokens get 0."""
        unpadded = self._tokens.unpadded(logits.astype("float32"), len(keep))
        weights = np.exp(np.where(keep, unpadded - unpadded[keep].max(initial=-np.inf), -np.inf))
        result: Array = weights / max(float(weights.sum()), np.finfo(np.float32).tiny)
        return result


def _largest(scores: Array, count: int) -> Array:
    """Return the indices of the largest scores in the flattened array, largest score first.

    If scores are equal, the first indices are returned. `np.argpartition` would choose among them by the processor's
    instruction sets.
    """
    flat = -scores.reshape(-1)
    indices = (
        np.flatnonzero(flat <= np.partition(flat, count - 1)[count - 1]) if count < flat.size else np.arange(flat.size)
    )
    return indices[np.argsort(flat[indices], kind="stable")][:count]


def _characters(encoding: Any, first: int, last: int, side: int, whole_words: bool) -> tuple[int, int]:
    """Return the character positions (start, end) of a span of tokens.

    With `whole_words`, the span is extended to whole words, if the tokenizer has words.
    """
    if whole_words:
        begins, ends = (encoding.token_to_word(token) for token in (first, last))
        if begins is not None and ends is not None:
            return int(encoding.word_to_chars(begins, side)[0]), int(encoding.word_to_chars(ends, side)[1])
    return int(encoding.offsets[first][0]), int(encoding.offsets[last][1])
