"""Token classification: a tag for each word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data.batches import Encoded, encode_words
from ..data.rows import Rows
from ..interfaces.task import Task
from ..measuring.accuracy.predictors import Predictor, Tags
from ..models.modality_models import TextModel


class ORTModelForTokenClassification(TextModel):
    """Named entities and the like: `logits: (batch, sequence, num_labels)`."""

    task = "token-classification"


class TokenClassification(Task):
    """Token classification: a tag for each word."""

    model = ORTModelForTokenClassification

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_words(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Tags

    def fronts(self) -> Mapping[str, Any]:
        from ..deploying.triton.text_fronts import TAGS

        return {"token-classification": TAGS}
