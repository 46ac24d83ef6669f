"""Task `text-ranking`: documents ranked by their relevance to a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..artifact.sentence_settings import sentence_settings
from ..data.encoded_rows import EncodedRows, cut, from_tokenizer
from ..data.labels import texts
from ..data.rows import DatasetRows
from ..deploying.triton.text_fronts import TextFront, TextModelFacts, TritonTensor
from ..errors import InputError, TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Values, metric_of_sums
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.embedding_and_scoring import activation_path
from ..serving.operations import Operation
from ..upstream.output_silencing import quiet
from .text_classification import (
    CLASSIFICATION,
    ClassificationOperation,
    ORTModelForSequenceClassification,
    RankingOperation,
)

_SIDES = ("positive", "negative")
_CUT = 10


def _documents(rows: DatasetRows, uses: Sequence[str] = _SIDES) -> list[tuple[list[str], ...]]:
    """Return the documents of each row: one list of texts per use (`positive`, `negative`)."""
    columns = [[[value] if isinstance(value, str) else list(value or []) for value in rows.column(use)] for use in uses]
    return list(zip(*columns, strict=True))


def _encode_queries(rows: DatasetRows, processor: Any, max_length: int | None, prompt: str = "") -> EncodedRows:
    """Tokenize a (query, document) pair for each document of each row, with the prompt before each query.

    A missing column is skipped, because calibration data may have no irrelevant documents.
    """
    columns = _documents(rows, [use for use in _SIDES if rows.has(use)])
    pairs = [
        (query, document)
        for query, documents_of_row in zip(texts(rows, "query"), columns, strict=True)
        for documents in documents_of_row
        for document in documents
    ]
    if not pairs:
        raise InputError(
            f"No row of {rows.sample.source} contains a document.",
            fix="use data with at least one document, in a column such as positive or negative.",
        )
    first, second = [prompt + query for query, _ in pairs], [document for _, document in pairs]
    return from_tokenizer(processor(first, second, **cut(max_length)), processor)


def _gains(scores: Sequence[float], true: Sequence[float]) -> tuple[float, float, float]:
    """Return nDCG@10, MRR@10 and average precision of one row. Of documents with equal scores, irrelevant documents are ranked first."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], true[i]))
    relevant = [true[i] > 0 for i in order]
    best = sum(1 / np.log2(i + 2) for i in range(min(sum(relevant), _CUT)))
    gain = sum(hit / np.log2(i + 2) for i, hit in enumerate(relevant[:_CUT]))
    first = next((1 / (i + 1) for i, hit in enumerate(relevant[:_CUT]) if hit), 0.0)
    ranks = [i + 1 for i, hit in enumerate(relevant) if hit]
    precision = sum((n + 1) / rank for n, rank in enumerate(ranks)) / max(len(ranks), 1)
    return float(gain / best) if best else 0.0, first, precision


def _gain_sums(predictions: Values, references: Values) -> Floats:
    return np.asarray([(*_gains(a, b), 1) for a, b in zip(predictions, references, strict=True)], np.float64)


_SCORES = {name: lambda sums, i=i: sums[..., i] / sums[..., -1] for i, name in enumerate(("ndcg@10", "mrr@10", "map"))}


class RankingPredictor(Predictor):
    """Predictor of a score for each document of a query. The reference is 1 for relevant and 0 for irrelevant documents."""

    kind = "rankings"
    offline_metrics = tuple(metric_of_sums(name, _gain_sums, _SCORES, key=name) for name in _SCORES)

    def _references(self) -> list[Any]:
        documents = _documents(self.rows)
        for row, (good, bad) in enumerate(documents):
            if not good or not bad or not all(isinstance(text, str) for text in (*good, *bad)):
                raise InputError(
                    f"Row {row} of {self.rows.sample.source} has {len(good)} relevant and {len(bad)} irrelevant documents, but a ranking "
                    "can be measured only for at least one relevant and one irrelevant document, all of them strings.",
                    fix="give each row at least one relevant and one irrelevant document, as strings.",
                )
        return [[1.0] * len(good) + [0.0] * len(bad) for good, bad in documents]

    def _encode(self) -> EncodedRows:
        with quiet():
            return _encode_queries(self.rows, self.processor, self.max_length, self.settings.prompt())

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return the scores, one list per row."""
        scores = [0.0] * len(self.encoded)
        for part, _, output in self.batches(model, what):
            for i, row in zip(part, output["logits"].float().cpu().reshape(len(part), -1)[:, 0].tolist(), strict=True):
                scores[i] = row
        predictions, start = [], 0
        for row in self.references:
            predictions.append(scores[start : start + len(row)])
            start += len(row)
        return predictions

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Return the fraction of rows in which two models rank the documents in the same order."""
        orders = [[torch.tensor(row).argsort(descending=True).tolist() for row in rows] for rows in (first, second)]
        return super().agreement(*orders)


class TextRanking(Task):
    """The task `text-ranking`: documents ranked by their relevance to a query."""

    model = ORTModelForSequenceClassification

    def encode(self, rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:
        return _encode_queries(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return RankingPredictor

    def operations(self) -> Sequence[Operation]:
        return (RankingOperation(), ClassificationOperation())

    def fronts(self) -> Mapping[str, TextFront]:
        return {"text-ranking": RANKING, "text-classification": CLASSIFICATION}


def _ranking(facts: TextModelFacts) -> dict[str, Any]:
    if facts.config.num_labels != 1:
        raise TaskError(
            f"The model has {facts.config.num_labels} labels, but ranking needs a cross-encoder with exactly one label, the relevance.",
            fix="deploy the model with `--task text-classification`.",
        )
    settings = sentence_settings(facts.artifact.path)
    path = activation_path(facts.config, settings)
    function = _FUNCTIONS.get(path.rpartition(".")[2])
    if function is None:
        raise TaskError(
            f"The model's activation function is {path}, but the Triton model that ranks texts supports only Sigmoid and Identity.",
            fix=f"deploy only the graph with layout='graph', and apply {path} to its logits in your client.",
        )
    return {"function": function, "prompt": settings.prompt(), "lower": settings.lower}


_FUNCTIONS = {"Sigmoid": "sigmoid", "Identity": "none"}


RANKING = TextFront(
    service="document_scores:DocumentRanker",
    inputs=(
        TritonTensor(name="QUERY", dtype="string"),
        TritonTensor(name="DOCUMENTS", dtype="string", dims=(-1,), ragged=True),
    ),
    outputs=lambda _: (
        TritonTensor(name="SCORES", dtype="float32", dims=(-1,)),
        TritonTensor(name="RANKING", dtype="int64", dims=(-1,)),
    ),
    options=_ranking,
    limit=lambda facts: sentence_settings(facts.artifact.path).max_length,
    sample={"QUERY": ["Where is my card?"], "DOCUMENTS": ["It was sent on Monday.", "The fee is low."]},
)
