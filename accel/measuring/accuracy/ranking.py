"""Documents in the order that a cross-encoder gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...data.batches import Encoded
from ...data.ranking import documents, encode_queries
from ...upstream.library_output import quiet
from .metrics import OFFERED, Floats, Metric, Values, ratio
from .predictors import Model, Predictor

_CUT = 10
_RANKED = OFFERED["rankings"]


class Rankings(Predictor):
    """A score for each document of a row's query; what is right is 1 for the relevant ones and 0 for the others."""

    kind = "rankings"

    def _references(self) -> list[Any]:
        return [[1.0] * len(good) + [0.0] * len(bad) for good, bad in documents(self.rows)]

    def _encode(self) -> Encoded:
        with quiet():
            return encode_queries(self.rows, self.processor, self.max_length, prompt=self.settings.prompt())

    def predict(self, model: Model, what: str) -> list[Any]:
        """Scores, one list a row."""
        scores = [0.0] * len(self.encoded)
        for part, _, output in self.batches(model, what):
            for i, row in zip(part, output["logits"].float().cpu().reshape(len(part), -1)[:, 0].tolist(), strict=True):
                scores[i] = row
        found, start = [], 0
        for row in self.references:
            found.append(scores[start : start + len(row)])
            start += len(row)
        return found

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Share of rows with the same order."""
        orders = [[torch.tensor(row).argsort(descending=True).tolist() for row in rows] for rows in (first, second)]
        return super().agreement(*orders)


def _gains(found: Sequence[float], true: Sequence[float]) -> tuple[float, float, float]:
    """nDCG and reciprocal rank over the first ten, and average precision, of one row; ties count as the worst order."""
    order = sorted(range(len(found)), key=lambda i: (-found[i], true[i]))
    relevant = [true[i] > 0 for i in order]
    best = sum(1 / np.log2(i + 2) for i in range(min(sum(relevant), _CUT)))
    gain = sum(hit / np.log2(i + 2) for i, hit in enumerate(relevant[:_CUT]))
    first = next((1 / (i + 1) for i, hit in enumerate(relevant[:_CUT]) if hit), 0.0)
    places = [i + 1 for i, hit in enumerate(relevant) if hit]
    precision = sum((n + 1) / place for n, place in enumerate(places)) / max(len(places), 1)
    return float(gain / best) if best else 0.0, first, precision


def ranked(name: str) -> Metric:
    """`ndcg@10`, `mrr@10` or `map`: the mean over rows."""
    place = _RANKED.index(name)

    def sums(predictions: Values, references: Values) -> Floats:
        found = [_gains(a, b)[place] for a, b in zip(predictions, references, strict=True)]
        return np.stack([np.asarray(found, np.float64), np.ones(len(found))], axis=1)

    def compute(predictions: Values, references: Values) -> dict[str, float]:
        rows = np.asarray([_gains(a, b) for a, b in zip(predictions, references, strict=True)], np.float64)
        return {one: float(value) for one, value in zip(_RANKED, rows.mean(0), strict=True)}

    return Metric(name=name, key=name, compute=compute, sums=sums, finish=ratio)
