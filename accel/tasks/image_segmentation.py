"""Task `image-segmentation`: semantic, instance and universal segmentation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import modeling_outputs
from transformers.utils import ModelOutput

from ..data.image_rows import one_channel
from ..errors import InputError, TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Values, metric_of_sums
from ..measuring.accuracy.picture_predictor import PicturePredictor, sizes_differ
from ..measuring.accuracy.predictors import Predictor
from ..models.modality_models import ImageModel


@dataclass
class ImageSegmentationOutput(ModelOutput):  # type: ignore[misc]
    """Output of a segmentation model that returns a class and a mask for each query.

    Attributes:
        logits: Class logits of DETR, `(batch, queries, classes)`.
        pred_boxes: Bounding boxes of DETR, `(batch, queries, 4)`.
        pred_masks: Masks of DETR, `(batch, queries, height / 4, width / 4)`.
        class_queries_logits: Class logits of MaskFormer and similar models, `(batch, queries, classes)`.
        masks_queries_logits: Masks of MaskFormer and similar models, `(batch, queries, height / 4, width / 4)`.
    """

    logits: torch.Tensor | None = None
    pred_boxes: torch.Tensor | None = None
    pred_masks: torch.Tensor | None = None
    class_queries_logits: torch.Tensor | None = None
    masks_queries_logits: torch.Tensor | None = None


class ORTModelForImageSegmentation(ImageModel):
    """Segmentation model: class logits per pixel (`logits: (batch, num_labels, height, width)`), or a class and a mask per query."""

    task = "image-segmentation"

    def _choose_output(self, names: Sequence[str]) -> Any:
        if {"pred_masks", "masks_queries_logits"} & set(names):
            return ImageSegmentationOutput
        if "logits" not in names:
            raise TaskError(
                f"The graph in {self.artifact.path} returns {', '.join(names)} and no masks, which {type(self).__name__} needs.",
                fix="load the folder with the ORTModelFor... class of the task that the model was exported for.",
            )
        return modeling_outputs.SemanticSegmenterOutput


ORTModelForSemanticSegmentation = ORTModelForImageSegmentation
"""Alias with Optimum's class name."""


IGNORED = 255
"""Class id of pixels that are left out of the metrics."""


def _areas(predictions: Values, _: Values) -> Floats:
    labels = sorted({int(entry[0]) for row in predictions for entry in row})
    index = {label: i for i, label in enumerate(labels)}
    sums = np.zeros((len(predictions), 3, len(labels)))
    for i, row in enumerate(predictions):
        for label, *counts in row:
            sums[i, :, index[int(label)]] += counts
    return sums.reshape(len(predictions), -1)


def _share(sums: Floats, which: str) -> Floats:
    """Compute a metric from pixel counts per class: `(..., 3 * classes)` becomes `(...)`.

    The counts are the correct, the predicted and the true pixels of each class. Classes without predicted and true pixels are left out.
    """
    right, predicted, true = np.split(sums, 3, axis=-1)
    if which == "pixel_accuracy":
        right, true = right.sum(-1, keepdims=True), true.sum(-1, keepdims=True)
    below = predicted + true - right if which == "mean_iou" else true
    shares = np.divide(right, below, out=np.zeros_like(right), where=below > 0)
    count = (below > 0).sum(-1).astype(np.float64)
    means: Floats = np.divide(shares.sum(-1), count, out=np.full_like(count, np.nan), where=count > 0)
    return means


_SCORES = {name: functools.partial(_share, which=name) for name in ("mean_iou", "pixel_accuracy", "mean_accuracy")}


class SegmentationPredictor(PicturePredictor):
    """Predictor of pixel counts for each class in an image: `(class, correct pixels, predicted pixels, true pixels)`."""

    kind = "areas"
    use = "mask"
    offline_metrics = tuple(metric_of_sums(name, _areas, _SCORES, key=name) for name in _SCORES)

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        maps: Sequence[Any] = self.processor.post_process_semantic_segmentation(output, target_sizes=list(sizes))
        return maps

    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        true = one_channel(truth, row, "classes").astype(np.int64)
        if true.shape != size:
            raise sizes_differ("mask", row, true.shape, size)
        if getattr(self.processor, "do_reduce_labels", False):
            # In ADE20K's masks, 0 is the background and classes start at 1; the model's classes start at 0 and have no background.
            true = np.where(true == 0, IGNORED, true - 1)
        counted = true != IGNORED
        classes = answer.numpy()[counted]
        true = true[counted]
        class_count = int(self.config.num_labels)
        if true.size and not 0 <= true.min() <= true.max() < class_count:
            unknown = sorted({int(c) for c in np.unique(true)} - set(range(class_count)))[:5]
            raise InputError(
                f"The mask of row {row} contains the class ids {unknown}, but the model has only the class ids 0 to {class_count - 1}.",
                fix=f"use masks with the model's class ids, and {IGNORED} for pixels that must not be measured.",
            )
        right, predicted, expected = (
            np.bincount(values, minlength=class_count) for values in (classes[classes == true], classes, true)
        )
        return [
            (int(c), int(right[c]), int(predicted[c]), int(expected[c])) for c in np.flatnonzero(predicted + expected)
        ]


class ImageSegmentation(Task):
    """The task `image-segmentation`: semantic, instance and universal segmentation."""

    model = ORTModelForImageSegmentation

    def predictor(self, config: Any) -> type[Predictor]:
        return SegmentationPredictor
