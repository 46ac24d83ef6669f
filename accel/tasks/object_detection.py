"""Task `object-detection`: bounding boxes and classes of objects in images."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.utils import ModelOutput

from ..data.columns import inner
from ..data.labels import translation
from ..data.rows import DatasetRows
from ..errors import InputError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Metric, Values
from ..measuring.accuracy.picture_predictor import PicturePredictor
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.modality_models import ImageModel


@dataclass
class ObjectDetectionOutput(ModelOutput):  # type: ignore[misc]
    """Output of a detection model; an image processor's `post_process_object_detection` converts it to boxes in pixels.

    Attributes:
        logits: Class logits, `(batch, queries, classes)`.
        pred_boxes: Center x, center y, width and height as fractions of the image size, `(batch, queries, 4)`.
        order_logits: Reading order of page regions, `(batch, queries, queries)`; only page layout models.
        out_masks: Masks of page regions, `(batch, queries, height / 4, width / 4)`; only page layout models.
        objectness_logits: Logit that the box contains an object, `(batch, queries)`; only OWLv2.
    """

    logits: torch.Tensor | None = None
    pred_boxes: torch.Tensor | None = None
    order_logits: torch.Tensor | None = None
    out_masks: torch.Tensor | None = None
    objectness_logits: torch.Tensor | None = None


class ORTModelForObjectDetection(ImageModel):
    """Model that detects objects in images: `logits: (batch, queries, classes)` and `pred_boxes: (batch, queries, 4)`."""

    task = "object-detection"
    output_class = ObjectDetectionOutput


_BOX = ("bbox", "bboxes", "boxes", "box")
_CATEGORY = ("category", "categories", "category_id", "label", "labels", "class", "class_label")
_CROWD = ("iscrowd", "is_crowd")
THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""COCO's ten thresholds: a box matches an object if their intersection over union is at least the threshold."""
_RECALLS = np.linspace(0, 1, 101)
_MOST_BOXES = 100  # maximum number of predicted boxes per class and image, as in COCO's evaluation


@dataclass(frozen=True, slots=True)
class Box:
    """An object in an image.

    Attributes:
        label: The model's class id of the object.
        corners: Bounding box `(left, top, right, bottom)` in pixels.
        crowd: Whether the object is a group of objects, as marked in COCO data.
    """

    label: int
    corners: tuple[float, float, float, float]
    crowd: bool = False


def boxes(rows: DatasetRows, config: Any) -> list[list[Box]]:
    """Return the objects of each row from a column in COCO's format.

    Each value is `{"bbox": [[x, y, width, height], ...], "category": [...]}` in pixels, or a list with a dictionary per object.

    Args:
        rows: The data with mapped columns.
        config: The model's config, which has the labels.

    Raises:
        InputError: An object is invalid, or its class is not one of the model's classes.
    """
    fields = _fields(rows)
    box, category = _field(fields, _BOX, rows), _field(fields, _CATEGORY, rows)
    crowd = next((key for key in _CROWD if key in fields), None)
    kind = fields[category]
    objects = [_objects(value) for value in rows.column("objects")]
    flat = [item[category] for row in objects for item in row]
    number = translation(flat, inner(kind) or kind, config, rows)
    return [
        [
            Box(number(item[category]), _corners(item[box], i), bool(item[crowd]) if crowd is not None else False)
            for item in row
        ]
        for i, row in enumerate(objects)
    ]


def categories(rows: DatasetRows) -> list[str]:
    """Return the class names of the objects: the names in the data set's features, or all names in the data, sorted.

    Raises:
        InputError: Classes are numbers without names.
    """
    fields = _fields(rows)
    category = _field(fields, _CATEGORY, rows)
    declared = getattr(inner(fields[category]) or fields[category], "names", None)
    if declared:
        return list(declared)
    names = {item[category] for value in rows.column("objects") for item in _objects(value)}
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"The classes in the column {rows.name_of('objects')!r} are numbers without names, but a zero-shot model searches for objects "
            "by their class names.",
            fix="use class names in the column, or a `datasets` feature ClassLabel(names=[...]).",
        )
    return sorted(names)


def _fields(rows: DatasetRows) -> Mapping[str, Any]:
    """Return the feature types of an object's fields, by field name."""
    feature = rows.feature("objects")
    fields: Mapping[str, Any] = feature if isinstance(feature, Mapping) else inner(feature)
    return fields


def _field(fields: Mapping[str, Any], names: Sequence[str], rows: DatasetRows) -> str:
    """Return the first of the known field names that the objects have.

    Raises:
        InputError: The objects have none of these fields.
    """
    field = next((key for key in names if key in fields), None)
    if field is None:
        raise InputError(
            f"The objects in the column {rows.name_of('objects')!r} have the fields {sorted(fields)}, but one of the fields "
            f"{', '.join(names)} is needed.",
            fix="use COCO's format: {'bbox': [[x, y, width, height], ...], 'category': [...]}.",
        )
    return field


def _objects(value: Any) -> list[dict[str, Any]]:
    """Return a row's objects as dictionaries; `datasets` may store them as one dictionary of lists."""
    if isinstance(value, Mapping):
        return [dict(zip(value, item, strict=True)) for item in zip(*value.values(), strict=True)]
    return [dict(item) for item in value or []]


def _corners(box: Sequence[float], row: int) -> tuple[float, float, float, float]:
    if len(box) != 4 or min(box[2:]) < 0:
        raise InputError(
            f"Row {row} of the data contains the invalid box {list(box)}.",
            fix="use COCO's format: [x, y, width, height] in pixels, with width and height of at least 0.",
        )
    left, top, width, height = (float(value) for value in box)
    return left, top, left + width, top + height


def check_boxes(boxes_of_rows: Sequence[Sequence[Box]], sizes: Sequence[tuple[int, int]], source: str) -> None:
    """Raise for boxes that are probably not in COCO's format, because they are outside of their images or smaller than a pixel.

    Args:
        boxes_of_rows: Objects of each row.
        sizes: Width and height of each row's image, in pixels.
        source: Name of the data.

    Raises:
        InputError: More than a tenth of the boxes exceed the image by more than two pixels plus 2 %, or all boxes are below one pixel.
    """
    pairs = [(box.corners, size) for row, size in zip(boxes_of_rows, sizes, strict=True) for box in row]
    outside = [(corners, size) for corners, size in pairs if any(corners[2 + i] > 1.02 * size[i] + 2 for i in range(2))]
    tiny = pairs and all(max(corners) <= 1 for corners, _ in pairs)
    if not tiny and len(outside) <= len(pairs) / 10:
        return
    (left, top, right, bottom), size = (outside or pairs)[0]
    raise InputError(
        f"{len(outside)} of {len(pairs)} boxes of {source} extend beyond their images, such as "
        f"{[left, top, right - left, bottom - top]} in an image of {size[0]} x {size[1]} pixels. The boxes may contain corners "
        "(left, top, right, bottom) instead of widths and heights."
        if outside
        else f"All boxes of {source} are smaller than a pixel. The boxes may contain fractions of the image size instead of pixels.",
        fix="convert the boxes to COCO's format: [x, y, width, height] in pixels.",
    )


def overlaps(predicted: Floats, true: Floats, crowd: Floats) -> Floats:
    """Return the intersection over union of predicted boxes `(n, 4)` and true boxes `(m, 4)` as an array `(n, m)`.

    Boxes are (left, top, right, bottom). For crowds, the intersection is divided by the area of the predicted box, as in COCO's evaluation.
    """
    low = np.maximum(predicted[:, None, :2], true[None, :, :2])
    high = np.minimum(predicted[:, None, 2:], true[None, :, 2:])
    both = np.clip(high - low, 0, None).prod(-1)
    area = np.clip(predicted[:, 2:] - predicted[:, :2], 0, None).prod(-1)[:, None]
    true_area = np.clip(true[:, 2:] - true[:, :2], 0, None).prod(-1)[None]
    union = np.where(crowd[None] > 0, area, area + true_area - both)
    shares: Floats = np.divide(both, union, out=np.zeros_like(both), where=union > 0)
    return shares


def matched(shares: Floats, crowd: Floats) -> tuple[np.ndarray, np.ndarray]:
    """Return two boolean arrays `(10, n)`: whether each box matches an object at each threshold, and whether the box is ignored.

    The rules are the rules of COCO's evaluation script. Boxes must be sorted by score, because each object is matched by one box, the first
    that overlaps it enough. Boxes that match only a crowd are ignored; several boxes can match the same crowd.
    """
    hits = np.zeros((len(THRESHOLDS), len(shares)), bool)
    ignored = np.zeros_like(hits)
    plain = crowd <= 0
    for t, threshold in enumerate(THRESHOLDS):
        free = plain.copy()
        for box, row in enumerate(shares):
            candidates = np.where(free, row, -1.0)
            if candidates.size and candidates.max() >= threshold:
                # If several objects overlap the box equally, COCO's evaluation script uses the last object.
                free[len(candidates) - 1 - int(candidates[::-1].argmax())] = False
                hits[t, box] = True
            elif (row[~plain] >= threshold).any():
                ignored[t, box] = True
    return hits, ignored


def _by_class(rows: Sequence[Sequence[Any]]) -> dict[int, dict[int, list[Any]]]:
    """Group entries by label, then by row."""
    entries: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for i, row in enumerate(rows):
        for entry in row:
            entries[int(entry[0])][i].append(entry)
    return entries


def _precision(predictions: Values, references: Values) -> Callable[[Floats], Floats]:
    """Return a function from weights of rows `(samples, rows)` to average precisions `(samples, 10)`, one per threshold."""
    guesses, truths = _by_class(predictions), _by_class(references)
    classes = []
    for label, by_row in truths.items():
        objects = np.zeros(len(references))
        scores, rows, hits, ignored = [np.zeros(0)], [np.zeros(0, int)], [], []
        for row in sorted({*by_row, *guesses[label]}):
            true = np.asarray([entry[1:5] for entry in by_row[row]], np.float64).reshape(-1, 4)
            crowd = np.asarray([float(entry[5]) for entry in by_row[row]])
            objects[row] = (crowd <= 0).sum()
            ranked = sorted(guesses[label][row], key=lambda entry: -entry[1])[:_MOST_BOXES]
            predicted = np.asarray([entry[2:6] for entry in ranked], np.float64).reshape(-1, 4)
            hit, skipped = matched(overlaps(predicted, true, crowd), crowd)
            scores.append(np.asarray([entry[1] for entry in ranked], np.float64))
            rows.append(np.full(len(ranked), row))
            hits.append(hit)
            ignored.append(skipped)
        order = np.argsort(-np.concatenate(scores), kind="stable")
        hit, skipped = np.concatenate(hits, 1)[:, order], np.concatenate(ignored, 1)[:, order]
        classes.append((objects, np.concatenate(rows)[order], hit, ~hit & ~skipped))

    def average(weights: Floats) -> Floats:
        return np.stack([_average_precision(classes, sample) for sample in weights])

    return average


def _average_precision(classes: Sequence[tuple[Floats, np.ndarray, np.ndarray, np.ndarray]], weights: Floats) -> Floats:
    """Return the average precision at each threshold, `(10,)`: precision at 101 recall values, averaged over recall and classes."""
    values = []
    for objects, rows, hits, misses in classes:
        total = weights @ objects
        if total == 0:
            continue  # the weighted rows have no object of this class
        weight = weights[rows]
        right, wrong = np.cumsum(hits * weight, 1), np.cumsum(misses * weight, 1)
        detections = right + wrong
        precision = np.divide(right, detections, out=np.zeros_like(detections), where=detections > 0)
        # COCO's interpolation: the precision at each recall value is the maximum precision at this or any higher recall.
        precision = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
        row = np.zeros((len(THRESHOLDS), len(_RECALLS)))
        for t in range(len(THRESHOLDS)):
            indices = np.searchsorted(right[t] / total, _RECALLS, side="left")
            inside = indices < precision.shape[1]
            row[t, inside] = precision[t, indices[inside]]
        values.append(row.mean(1))
    # Without any object in the data, the result is NaN and not 0, because there was nothing to measure.
    return np.mean(values, 0) if values else np.full(len(THRESHOLDS), np.nan)


def _box_metric(name: str, part: slice) -> Metric:
    def compute(predictions: Values, references: Values) -> dict[str, float]:
        (values,) = _precision(predictions, references)(np.ones((1, len(references))))
        return {"map": float(values.mean()), "map_50": float(values[0]), "map_75": float(values[5])}

    def resampled(predictions: Values, references: Values) -> Callable[[Floats], Floats]:
        average = _precision(predictions, references)
        return lambda weights: average(weights)[:, part].mean(1)

    return Metric(name=name, key=name, compute=compute, resampled=resampled)


class DetectionPredictor(PicturePredictor):
    """Predictor of all boxes in each image, without a score threshold: `(label, score, left, top, right, bottom)`."""

    kind = "boxes"
    offline_metrics = (
        # Each slice selects the thresholds of `THRESHOLDS` over which the metric is averaged, as in COCO's evaluation script.
        _box_metric("map", slice(0, 10)),
        _box_metric("map_50", slice(0, 1)),
        _box_metric("map_75", slice(5, 6)),
    )

    def _references(self) -> list[Any]:
        self._objects: list[list[Box]] = boxes(self.rows, self.config)
        return [[(box.label, *box.corners, int(box.crowd)) for box in row] for row in self._objects]

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return the predicted boxes, one list per row."""
        self._sizes: list[tuple[int, int]] = [(0, 0)] * len(self.rows)
        predictions = super().predict(model, what)
        check_boxes(self._objects, self._sizes, self.rows.sample.source)
        return predictions

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        answers: Sequence[Any] = self.processor.post_process_object_detection(
            output, threshold=0.0, target_sizes=torch.tensor(sizes)
        )
        return answers

    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        self._sizes[row] = size[::-1]
        together = zip(answer["labels"].tolist(), answer["scores"].tolist(), answer["boxes"].tolist(), strict=True)
        return [(label, score, *corners) for label, score, corners in together]


class ObjectDetection(Task):
    """The task `object-detection`: bounding boxes and classes of objects in images."""

    model = ORTModelForObjectDetection

    def predictor(self, config: Any) -> type[Predictor]:
        return DetectionPredictor
