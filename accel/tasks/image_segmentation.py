"""Semantic, instance and universal segmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import modeling_outputs
from transformers.utils import ModelOutput

from ..data.batches import Encoded
from ..data.image_rows import encode_pictures, one_channel
from ..data.rows import Rows
from ..errors import InputError, TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Metric, Values
from ..measuring.accuracy.picture_predictor import PicturePredictor, sizes_differ
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


IGNORED = 255
"""The class of pixels that are not measured."""


class Segments(PicturePredictor):
    """Classes of an image's pixels, counted: `(class, pixels that are right, that were predicted, that are true)`."""

    kind = "areas"
    use = "mask"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {name: _area_metric(name) for name in ("mean_iou", "pixel_accuracy", "mean_accuracy")}

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        found: Sequence[Any] = self.processor.post_process_semantic_segmentation(output, target_sizes=list(sizes))
        return found

    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        true = one_channel(truth, row, "classes").astype(np.int64)
        if true.shape != size:
            raise sizes_differ("mask", row, true.shape, size)
        if getattr(self.processor, "do_reduce_labels", False):
            # ADE20K's 0 is none of its classes, which the model counts from 0.
            true = np.where(true == 0, IGNORED, true - 1)
        counted = true != IGNORED
        found = answer.numpy()[counted]
        true = true[counted]
        known = int(self.config.num_labels)
        if true.size and not 0 <= true.min() <= true.max() < known:
            raise InputError(
                f"The mask of row {row} holds the classes {sorted(set(np.unique(true)) - set(range(known)))[:5]}; the model has "
                f"{known}, from 0.",
                fix=f"use masks with the model's classes; {IGNORED} marks pixels that are not measured.",
            )
        right, predicted, wanted = (
            np.bincount(values, minlength=known) for values in (found[found == true], found, true)
        )
        return [(int(c), int(right[c]), int(predicted[c]), int(wanted[c])) for c in np.flatnonzero(predicted + wanted)]


def _areas(predictions: Values, _: Values) -> Floats:
    labels = sorted({int(entry[0]) for row in predictions for entry in row})
    place = {label: i for i, label in enumerate(labels)}
    sums = np.zeros((len(predictions), 3, len(labels)))
    for i, row in enumerate(predictions):
        for label, *counts in row:
            sums[i, :, place[int(label)]] += counts
    return sums.reshape(len(predictions), -1)


def _share(sums: Floats, which: str) -> Floats:
    """`(..., 3 * classes)` to `(...)`; classes that are neither predicted nor true do not count."""
    right, predicted, true = np.split(sums, 3, axis=-1)
    if which == "pixel_accuracy":
        right, true = right.sum(-1, keepdims=True), true.sum(-1, keepdims=True)
    below = predicted + true - right if which == "mean_iou" else true
    shares = np.divide(right, below, out=np.zeros_like(right), where=below > 0)
    count = (below > 0).sum(-1).astype(np.float64)
    means: Floats = np.divide(shares.sum(-1), count, out=np.full_like(count, np.nan), where=count > 0)
    return means


def _area_metric(name: str) -> Metric:
    def compute(predictions: Values, references: Values) -> dict[str, float]:
        sums = _areas(predictions, references).sum(0)
        return {which: float(_share(sums, which)) for which in ("mean_iou", "pixel_accuracy", "mean_accuracy")}

    return Metric(name=name, key=name, compute=compute, sums=_areas, finish=lambda sums: _share(sums, name))


class ImageSegmentation(Task):
    """Semantic, instance and universal segmentation."""

    model = ORTModelForImageSegmentation

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_pictures(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Segments
