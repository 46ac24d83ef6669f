"""Metrics of transcripts, frames and voices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...data.labels import IGNORED
from .metrics import Floats, Metric, Values, ratio

# Transcripts: predictions and references are texts.


def edits(found: Sequence[str], true: Sequence[str]) -> int:
    """Insertions, removals and replacements between two sequences (Levenshtein, 1966)."""
    row = list(range(len(found) + 1))
    for i, wanted in enumerate(true, start=1):
        before, row[0] = row[0], i
        for j, have in enumerate(found, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (wanted != have))
    return row[-1]


def _edit_sums(split: Callable[[str], Sequence[str]]) -> Callable[[Values, Values], Floats]:
    def sums(predictions: Values, references: Values) -> Floats:
        pairs = [(split(found), split(true)) for found, true in zip(predictions, references, strict=True)]
        return np.asarray([(edits(found, true), len(true)) for found, true in pairs], np.float64)

    return sums


def edit_rate(name: str) -> Metric:
    """Edits over the length of the references: the word error rate `wer`, and that of characters, `cer`."""
    sums = _edit_sums(str.split if name == "wer" else list)

    def compute(predictions: Values, references: Values) -> dict[str, float]:
        edits, length = sums(predictions, references).sum(0)
        return {name: float(edits / length) if length else float("nan"), "edits": float(edits), "length": float(length)}

    return Metric(name=name, key=name, compute=compute, sums=sums, finish=ratio, higher_is_better=False)


# Frames: predictions and references are lists of class numbers.


def _frame_sums(predictions: Values, references: Values) -> Floats:
    rows = []
    for found, true in zip(predictions, references, strict=True):
        a, b = np.asarray(found), np.asarray(true)
        rows.append((int(((a == b) & (b != IGNORED)).sum()), int((b != IGNORED).sum())))
    return np.asarray(rows, np.float64)


def frame_accuracy(name: str) -> Metric:
    """The share of labelled frames with the right class."""
    return Metric(name=name, key=name, compute=_frame_accuracy, sums=_frame_sums, finish=ratio)


def _frame_accuracy(predictions: Values, references: Values) -> dict[str, float]:
    return {"accuracy": float(ratio(_frame_sums(predictions, references).sum(0)))}


# Voices: predictions are cosines, references 1 for one speaker and 0 for two.


def equal_error_rate(name: str) -> Metric:
    """`eer`: the share of mistakes at the threshold that refuses as many of the same as it accepts of others."""
    return Metric(name=name, key=name, compute=_equal_error_rate, higher_is_better=False)


def _equal_error_rate(predictions: Values, references: Values) -> dict[str, float]:
    """Where as many pairs of one speaker are refused as pairs of two are accepted, between the two thresholds around it."""
    from sklearn.metrics import roc_auc_score, roc_curve

    true = np.asarray(references, np.int64)
    if len(set(true.tolist())) < 2:
        return {"eer": float("nan"), "roc_auc": float("nan")}  # nothing to tell apart
    accepted, right, _ = roc_curve(true, np.asarray(predictions, np.float64), drop_intermediate=False)
    gap = (1 - right) - accepted
    last = int(np.flatnonzero(gap >= 0)[-1])
    after = min(last + 1, len(gap) - 1)
    share = gap[last] / (gap[last] - gap[after]) if gap[last] != gap[after] else 0.0
    rate = accepted[last] + share * (accepted[after] - accepted[last])
    return {"eer": float(rate), "roc_auc": float(roc_auc_score(true, np.asarray(predictions, np.float64)))}
