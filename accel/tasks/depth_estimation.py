"""Depth of each pixel."""

from __future__ import annotations

from typing import Any

from ..data.batches import Encoded
from ..data.pictures import encode_pictures
from ..data.rows import Rows
from ..interfaces.task import Task
from ..measuring.accuracy.pictures import Depths
from ..measuring.accuracy.predictors import Predictor
from ..models.modality_models import ImageModel


class ORTModelForDepthEstimation(ImageModel):
    """How far away each pixel is: `predicted_depth: (batch, height, width)`."""

    task = "depth-estimation"


class DepthEstimation(Task):
    """Depth of each pixel."""

    model = ORTModelForDepthEstimation

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_pictures(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Depths
