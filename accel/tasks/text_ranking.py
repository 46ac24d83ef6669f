"""Ranking: documents by how well they answer a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..artifact.sentence_settings import sentence_settings
from ..data.batches import Encoded, cut, from_tokenizer
from ..data.labels import texts
from ..data.rows import Rows
from ..deploying.triton.text_fronts import Facts, Tensor, TextFront
from ..errors import InputError, TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Metric, Values, ratio
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.text_rows import activation_path
from ..serving.operations import Operation
from ..upstream.library_output import quiet
from .text_classification import CLASSIFICATION, Classify, ORTModelForSequenceClassification, Rank

_SIDES = ("positive", "negative")
_CUT = 10
_METRICS = ("ndcg@10", "mrr@10", "map")


def _documents(rows: Rows, uses: Sequence[str] = _SIDES) -> list[tuple[list[str], ...]]:
    """The documents of each row, a list for each use."""
    columns = [[[one] if isinstance(one, str) else list(one or []) for one in rows.column(use)] for use in uses]
    return list(zip(*columns, strict=True))


def _encode_queries(rows: Rows, processor: Any, max_length: int | None, prompt: str = "") -> Encoded:
    """One pair of texts for each document of each query, of rows without an irrelevant one (for calibration) what there is. The prompt
    is put before each query.
    """
    columns = _documents(rows, [use for use in _SIDES if rows.has(use)])
    pairs = [
        (query, document)
        for query, several in zip(texts(rows, "query"), columns, strict=True)
        for one in several
        for document in one
    ]
    if not pairs:
        raise InputError(f"{rows.sample.source} holds no documents.", fix="give at least one document.")
    first, second = [prompt + query for query, _ in pairs], [document for _, document in pairs]
    return from_tokenizer(processor(first, second, **cut(max_length)), processor)


class Rankings(Predictor):
    """A score for each document of a row's query; what is right is 1 for the relevant ones and 0 for the others."""

    kind = "rankings"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {name: _ranked(name) for name in _METRICS}

    def _references(self) -> list[Any]:
        found = _documents(self.rows)
        for row, (good, bad) in enumerate(found):
            if not good or not bad or not all(isinstance(text, str) for text in (*good, *bad)):
                raise InputError(
                    f"Row {row} of {self.rows.sample.source} has {len(good)} relevant documents and {len(bad)} others.",
                    fix="give at least one text of each: without both there is no order to be right.",
                )
        return [[1.0] * len(good) + [0.0] * len(bad) for good, bad in found]

    def _encode(self) -> Encoded:
        with quiet():
            return _encode_queries(self.rows, self.processor, self.max_length, self.settings.prompt())

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


def _ranked(name: str) -> Metric:
    """`ndcg@10`, `mrr@10` or `map`: the mean over rows."""
    place = _METRICS.index(name)

    def sums(predictions: Values, references: Values) -> Floats:
        found = [_gains(a, b)[place] for a, b in zip(predictions, references, strict=True)]
        return np.stack([np.asarray(found, np.float64), np.ones(len(found))], axis=1)

    def compute(predictions: Values, references: Values) -> dict[str, float]:
        rows = np.asarray([_gains(a, b) for a, b in zip(predictions, references, strict=True)], np.float64)
        return {one: float(value) for one, value in zip(_METRICS, rows.mean(0), strict=True)}

    return Metric(name=name, key=name, compute=compute, sums=sums, finish=ratio)


class TextRanking(Task):
    """Ranking: documents by how well they answer a query."""

    model = ORTModelForSequenceClassification

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return _encode_queries(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Rankings

    def operations(self) -> Sequence[Operation]:
        return (Rank(), Classify())

    def fronts(self) -> Mapping[str, TextFront]:
        return {"text-ranking": RANKING, "text-classification": CLASSIFICATION}


def _ranking(facts: Facts) -> dict[str, Any]:
    if facts.config.num_labels != 1:
        raise TaskError(
            f"A model that ranks has one output, and this one has {facts.config.num_labels}.",
            fix="deploy it for text-classification.",
        )
    settings = sentence_settings(facts.artifact.path)
    path = activation_path(facts.config, settings)
    function = _FUNCTIONS.get(path.rpartition(".")[2])
    if function is None:
        raise TaskError(
            f"The model makes scores by {path}, which the front model does not compute.",
            fix="deploy it with layout='graph', and apply it outside.",
        )
    return {"function": function, "prompt": settings.prompt(), "lower": settings.lower}


_FUNCTIONS = {"Sigmoid": "sigmoid", "Identity": "none"}


RANKING = TextFront(
    module="document_scores",
    inputs=(Tensor(name="QUERY", dtype="string"), Tensor(name="DOCUMENTS", dtype="string", dims=(-1,), ragged=True)),
    outputs=lambda _: (
        Tensor(name="SCORES", dtype="float32", dims=(-1,)),
        Tensor(name="RANKING", dtype="int64", dims=(-1,)),
    ),
    options=_ranking,
    limit=lambda facts: sentence_settings(facts.artifact.path).max_length,
    sample={"QUERY": ["Where is my card?"], "DOCUMENTS": ["It was sent on Monday.", "The fee is low."]},
)
