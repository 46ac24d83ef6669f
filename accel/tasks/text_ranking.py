"""Ranking: documents by how well they answer a query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data.batches import Encoded
from ..data.ranking import encode_queries
from ..data.rows import Rows
from ..interfaces.task import Task
from ..measuring.accuracy.predictors import Predictor
from ..measuring.accuracy.ranking import Rankings
from .text_classification import ORTModelForSequenceClassification


class TextRanking(Task):
    """Ranking: documents by how well they answer a query."""

    model = ORTModelForSequenceClassification

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_queries(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Rankings

    def fronts(self) -> Mapping[str, Any]:
        from ..deploying.triton.text_fronts import CLASSIFICATION, RANKING

        return {"text-ranking": RANKING, "text-classification": CLASSIFICATION}
