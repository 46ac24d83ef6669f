"""Semantic, instance and universal segmentation."""

from __future__ import annotations

from typing import Any

from ..data.batches import Encoded
from ..data.pictures import encode_pictures
from ..data.rows import Rows
from ..interfaces.task import Task
from ..measuring.accuracy.pictures import Segments
from ..measuring.accuracy.predictors import Predictor
from ..models.images import ORTModelForImageSegmentation


class ImageSegmentation(Task):
    """Semantic, instance and universal segmentation."""

    model = ORTModelForImageSegmentation

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_pictures(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Segments
