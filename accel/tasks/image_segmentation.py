"""Semantic, instance and universal segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import modeling_outputs
from transformers.utils import ModelOutput

from ..data.batches import Encoded
from ..data.pictures import encode_pictures
from ..data.rows import Rows
from ..errors import TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.pictures import Segments
from ..measuring.accuracy.predictors import Predictor
from ..models.modality_models import ImageModel


@dataclass
class ImageSegmentationOutput(ModelOutput):  # type: ignore[misc]
    """What a model returns that answers with a class and a mask for each of its queries.

    Attributes:
        logits: `(batch, queries, classes)`, of DETR.
        pred_boxes: `(batch, queries, 4)`, of DETR.
        pred_masks: `(batch, queries, height / 4, width / 4)`, of DETR.
        class_queries_logits: `(batch, queries, classes)`, of MaskFormer and its kind.
        masks_queries_logits: `(batch, queries, height / 4, width / 4)`, of these.
    """

    logits: torch.Tensor | None = None
    pred_boxes: torch.Tensor | None = None
    pred_masks: torch.Tensor | None = None
    class_queries_logits: torch.Tensor | None = None
    masks_queries_logits: torch.Tensor | None = None


class ORTModelForImageSegmentation(ImageModel):
    """Classes of pixels (`logits: (batch, num_labels, height, width)`), or of queries with a mask each."""

    task = "image-segmentation"

    def _choose_output(self, names: Sequence[str]) -> Any:
        if {"pred_masks", "masks_queries_logits"} & set(names):
            return ImageSegmentationOutput
        if "logits" not in names:
            raise TaskError(
                f"The graph in {self.artifact.path} returns {', '.join(names)}, and no masks.",
                fix="use the class that the model was exported for.",
            )
        return modeling_outputs.SemanticSegmenterOutput


ORTModelForSemanticSegmentation = ORTModelForImageSegmentation
"""The name that Optimum gives it."""


class ImageSegmentation(Task):
    """Semantic, instance and universal segmentation."""

    model = ORTModelForImageSegmentation

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_pictures(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Segments
