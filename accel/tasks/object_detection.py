"""Object detection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..data.batches import Encoded
from ..data.pictures import encode_pictures
from ..data.rows import Rows
from ..interfaces.task import Task
from ..measuring.accuracy.pictures import Detections
from ..measuring.accuracy.predictors import Predictor
from ..models.modality_models import ImageModel


@dataclass
class ObjectDetectionOutput(ModelOutput):  # type: ignore[misc]
    """What a detector returns; an image processor's `post_process_object_detection` turns it into boxes in pixels.

    Attributes:
        logits: `(batch, queries, classes)`
        pred_boxes: `(batch, queries, 4)`: centre, width and height, as shares of the image.
        order_logits: `(batch, queries, queries)`, of models of page layouts: which region is read before which.
        out_masks: `(batch, queries, height / 4, width / 4)`, of such models.
        objectness_logits: `(batch, queries)`, of OWLv2: whether there is an object at all.
    """

    logits: torch.Tensor | None = None
    pred_boxes: torch.Tensor | None = None
    order_logits: torch.Tensor | None = None
    out_masks: torch.Tensor | None = None
    objectness_logits: torch.Tensor | None = None


class ORTModelForObjectDetection(ImageModel):
    """Objects in images: `logits: (batch, queries, classes)` and `pred_boxes: (batch, queries, 4)`."""

    task = "object-detection"
    output_class = ObjectDetectionOutput


class ObjectDetection(Task):
    """Object detection."""

    model = ORTModelForObjectDetection

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_pictures(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Detections
