"""Text classification and regression, of a text or of a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data.batches import Encoded, encode_pairs
from ..data.rows import Rows
from ..interfaces.task import Task
from ..measuring.accuracy.predictors import Predictor, classifier
from ..models.encoders import ORTModelForSequenceClassification


class TextClassification(Task):
    """Text classification and regression, of a text or of a pair of texts."""

    model = ORTModelForSequenceClassification

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_pairs(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return classifier(config)

    def fronts(self) -> Mapping[str, Any]:
        from ..deploying.triton.text_fronts import CLASSIFICATION, ZERO_SHOT

        return {"text-classification": CLASSIFICATION, "zero-shot-classification": ZERO_SHOT}
