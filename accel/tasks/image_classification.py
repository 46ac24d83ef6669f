"""Image classification."""

from __future__ import annotations

from typing import Any

from ..data.batches import Encoded, encode_images
from ..data.rows import Rows
from ..interfaces.task import Task
from ..measuring.accuracy.predictors import Classes, Predictor
from ..models.modality_models import ImageModel


class ORTModelForImageClassification(ImageModel):
    """Image classification: `pixel_values: (batch, channels, height, width)` to `logits: (batch, num_labels)`."""

    task = "image-classification"


class ImageClassification(Task):
    """Image classification."""

    model = ORTModelForImageClassification

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_images(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Classes
