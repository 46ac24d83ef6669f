"""Task `image-classification`: one class per image."""

from __future__ import annotations

from typing import Any

from ..interfaces.task import Task
from ..measuring.accuracy.predictors import ClassPredictor, Predictor
from ..models.modality_models import ImageModel


class ORTModelForImageClassification(ImageModel):
    """Model that classifies images: `pixel_values: (batch, channels, height, width)` to `logits: (batch, num_labels)`."""

    task = "image-classification"


class ImageClassification(Task):
    """The task `image-classification`."""

    model = ORTModelForImageClassification

    def predictor(self, config: Any) -> type[Predictor]:
        return ClassPredictor
