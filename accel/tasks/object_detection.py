"""Object detection."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.utils import ModelOutput

from ..data.batches import Encoded
from ..data.columns import inner
from ..data.image_rows import encode_pictures
from ..data.labels import translation
from ..data.rows import Rows
from ..errors import InputError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Metric, Values
from ..measuring.accuracy.picture_predictor import PicturePredictor
from ..measuring.accuracy.predictors import Model, Predictor
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


_BOX = ("bbox", "bboxes", "boxes", "box")
_CATEGORY = ("category", "categories", "category_id", "label", "labels", "class", "class_label")
_CROWD = ("iscrowd", "is_crowd")
THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""COCO's overlaps from which on a box counts as found."""
_RECALLS = np.linspace(0, 1, 101)
_MOST_BOXES = 100  # of a class in an image


@dataclass(frozen=True, slots=True)
class Box:
    """An object that is in an image.

    Attributes:
        label: The model's number of its class.
        corners: `(left, top, right, bottom)` in pixels.
        crowd: Whether it is a group that is not to be taken apart, as COCO marks them.
    """

    label: int
    corners: tuple[float, float, float, float]
    crowd: bool = False


def boxes(rows: Rows, config: Any) -> list[list[Box]]:
    """The objects of each row, as COCO writes them: `{"bbox": [[x, y, width, height], ...], "category": [...]}` in pixels, or a
    list with such a dictionary an object.

    Args:
        rows: The data, its columns mapped.
        config: The model's, for labels.

    Raises:
        InputError: Objects in another form, or of classes that the model does not know.
    """
    assert rows.sample.columns is not None
    name = rows.sample.columns["objects"]
    feature = rows.dataset.features[name]
    fields = feature if isinstance(feature, Mapping) else inner(feature)
    box = _field(fields, _BOX, name)
    category = _field(fields, _CATEGORY, name)
    crowd = next((key for key in _CROWD if key in fields), None)
    kind = fields[category]
    found = [_objects(value) for value in rows.column("objects")]
    flat = [one[category] for row in found for one in row]
    number = translation(flat, inner(kind) or kind, config, rows)
    return [
        [
            Box(number(one[category]), _corners(one[box], i), bool(one[crowd]) if crowd is not None else False)
            for one in row
        ]
        for i, row in enumerate(found)
    ]


def categories(rows: Rows) -> list[str]:
    """The names of the objects' classes: those that the data declares, else all that occur, sorted.

    Raises:
        InputError: Numbers without names.
    """
    assert rows.sample.columns is not None
    name = rows.sample.columns["objects"]
    feature = rows.dataset.features[name]
    fields = feature if isinstance(feature, Mapping) else inner(feature)
    category = _field(fields, _CATEGORY, name)
    declared = getattr(inner(fields[category]) or fields[category], "names", None)
    if declared:
        return list(declared)
    found = {one[category] for value in rows.column("objects") for one in _objects(value)}
    if not found or not all(isinstance(one, str) for one in found):
        raise InputError(
            f"The classes in the column {name!r} are numbers without names, which are what a model for zero-shot detection looks for.",
            fix="give the names of the classes.",
        )
    return sorted(found)


def _field(fields: Any, known: Sequence[str], column: str) -> str:
    """The first of these names that objects have.

    Raises:
        InputError: They have none.
    """
    found = next((key for key in known if key in fields), None)
    if found is None:
        raise InputError(
            f"The objects in the column {column!r} have {sorted(fields)}, and none of {', '.join(known)}.",
            fix="give objects as COCO does: {'bbox': [[x, y, width, height], ...], 'category': [...]}.",
        )
    return found


def _objects(value: Any) -> list[dict[str, Any]]:
    """A row's objects, a dictionary each; `datasets` also keeps a dictionary of lists."""
    if isinstance(value, Mapping):
        return [dict(zip(value, one, strict=True)) for one in zip(*value.values(), strict=True)]
    return [dict(one) for one in value or []]


def _corners(box: Sequence[float], row: int) -> tuple[float, float, float, float]:
    if len(box) != 4 or min(box[2:]) < 0:
        raise InputError(
            f"A box of row {row} is {list(box)}.", fix="give boxes as COCO does: [x, y, width, height] in pixels."
        )
    left, top, width, height = (float(value) for value in box)
    return left, top, left + width, top + height


def check_boxes(found: Sequence[Sequence[Box]], sizes: Sequence[tuple[int, int]], source: str) -> None:
    """Refuse boxes that cannot be what COCO writes: those that end outside their images, and those in shares of them.

    Args:
        found: A list a row.
        sizes: Width and height of each row's image, in pixels.
        source: Name of the data.

    Raises:
        InputError: More than a tenth of them ends outside by more than two pixels and 2 %, or none is longer than a pixel.
    """
    pairs = [(box.corners, size) for row, size in zip(found, sizes, strict=True) for box in row]
    outside = [(corners, size) for corners, size in pairs if any(corners[2 + i] > 1.02 * size[i] + 2 for i in range(2))]
    tiny = pairs and all(max(corners) <= 1 for corners, _ in pairs)
    if not tiny and len(outside) <= len(pairs) / 10:
        return
    (left, top, right, bottom), size = (outside or pairs)[0]
    raise InputError(
        f"{len(outside)} of {len(pairs)} boxes of {source} end outside their images, such as "
        f"{[left, top, right - left, bottom - top]} in one of {size[0]} x {size[1]} pixels."
        if outside
        else f"All boxes of {source} are shorter than a pixel.",
        fix="give boxes as COCO does, [x, y, width, height] in pixels; these may be corners, or shares of the image.",
    )


class Detections(PicturePredictor):
    """Boxes in an image: `(label, score, left, top, right, bottom)`, whatever their scores."""

    kind = "boxes"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return METRICS

    def _references(self) -> list[Any]:
        self._objects: list[list[Box]] = boxes(self.rows, self.config)
        return [[(box.label, *box.corners, int(box.crowd)) for box in row] for row in self._objects]

    def predict(self, model: Model, what: str) -> list[Any]:
        """Boxes, a list a row."""
        self._sizes: list[tuple[int, int]] = [(0, 0)] * len(self.rows)
        found = super().predict(model, what)
        check_boxes(self._objects, self._sizes, self.rows.sample.source)
        return found

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        found: Sequence[Any] = self.processor.post_process_object_detection(
            output, threshold=0.0, target_sizes=torch.tensor(sizes)
        )
        return found

    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        self._sizes[row] = size[::-1]
        together = zip(answer["labels"].tolist(), answer["scores"].tolist(), answer["boxes"].tolist(), strict=True)
        return [(label, score, *corners) for label, score, corners in together]


def overlaps(found: Floats, true: Floats, crowd: Floats) -> Floats:
    """Intersection over union of boxes `(n, 4)` and `(m, 4)` given by corners: `(n, m)`; over a box's own area for a crowd."""
    low = np.maximum(found[:, None, :2], true[None, :, :2])
    high = np.minimum(found[:, None, 2:], true[None, :, 2:])
    both = np.clip(high - low, 0, None).prod(-1)
    area = np.clip(found[:, 2:] - found[:, :2], 0, None).prod(-1)[:, None]
    other = np.clip(true[:, 2:] - true[:, :2], 0, None).prod(-1)[None]
    whole = np.where(crowd[None] > 0, area, area + other - both)
    shares: Floats = np.divide(both, whole, out=np.zeros_like(both), where=whole > 0)
    return shares


def matched(shares: Floats, crowd: Floats) -> tuple[np.ndarray, np.ndarray]:
    """Which boxes, best first, hit an object that none before them hit, at each threshold; and which do not count: `(10, n)`.

    As COCO's script: a crowd may be hit often, and what hits nothing but a crowd does not count.
    """
    hits = np.zeros((len(THRESHOLDS), len(shares)), bool)
    ignored = np.zeros_like(hits)
    plain = crowd <= 0
    for t, threshold in enumerate(THRESHOLDS):
        free = plain.copy()
        for box, row in enumerate(shares):
            candidates = np.where(free, row, -1.0)
            if candidates.size and candidates.max() >= threshold:
                # Of equals COCO takes the last.
                free[len(candidates) - 1 - int(candidates[::-1].argmax())] = False
                hits[t, box] = True
            elif (row[~plain] >= threshold).any():
                ignored[t, box] = True
    return hits, ignored


def _by_class(rows: Sequence[Sequence[Any]]) -> dict[int, dict[int, list[Any]]]:
    """Entries by their label, and by their row."""
    found: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for i, row in enumerate(rows):
        for entry in row:
            found[int(entry[0])][i].append(entry)
    return found


def _precision(predictions: Values, references: Values) -> Callable[[Floats], Floats]:
    """A function from how often each row counts `(samples, rows)` to average precisions `(samples, 10)`, a threshold each."""
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
            found = np.asarray([entry[2:6] for entry in ranked], np.float64).reshape(-1, 4)
            hit, skipped = matched(overlaps(found, true, crowd), crowd)
            scores.append(np.asarray([entry[1] for entry in ranked], np.float64))
            rows.append(np.full(len(ranked), row))
            hits.append(hit)
            ignored.append(skipped)
        order = np.argsort(-np.concatenate(scores), kind="stable")
        hit, skipped = np.concatenate(hits, 1)[:, order], np.concatenate(ignored, 1)[:, order]
        classes.append((objects, np.concatenate(rows)[order], hit, ~hit & ~skipped))

    def average(weights: Floats) -> Floats:
        return np.stack([_average_precision(classes, one) for one in weights])

    return average


def _average_precision(classes: Sequence[tuple[Floats, np.ndarray, np.ndarray, np.ndarray]], weights: Floats) -> Floats:
    """The mean over classes of the area under precision and recall, at 101 recalls: `(10,)`."""
    values = []
    for objects, rows, hits, misses in classes:
        total = weights @ objects
        if total == 0:
            continue  # no object of the class in these rows
        weight = weights[rows]
        right, wrong = np.cumsum(hits * weight, 1), np.cumsum(misses * weight, 1)
        seen = right + wrong
        precision = np.divide(right, seen, out=np.zeros_like(seen), where=seen > 0)
        # The best precision at this recall or a higher one.
        precision = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
        row = np.zeros((len(THRESHOLDS), len(_RECALLS)))
        for t in range(len(THRESHOLDS)):
            places = np.searchsorted(right[t] / total, _RECALLS, side="left")
            inside = places < precision.shape[1]
            row[t, inside] = precision[t, places[inside]]
        values.append(row.mean(1))
    # Neither -1 nor 0 is a precision that nothing was measured of.
    return np.mean(values, 0) if values else np.full(len(THRESHOLDS), np.nan)


def _box_metric(name: str, part: slice) -> Metric:
    def compute(predictions: Values, references: Values) -> dict[str, float]:
        (values,) = _precision(predictions, references)(np.ones((1, len(references))))
        return {"map": float(values.mean()), "map_50": float(values[0]), "map_75": float(values[5])}

    def resampled(predictions: Values, references: Values) -> Callable[[Floats], Floats]:
        average = _precision(predictions, references)
        return lambda weights: average(weights)[:, part].mean(1)

    return Metric(name=name, key=name, compute=compute, resampled=resampled)


METRICS: Mapping[str, Metric] = {
    "map": _box_metric("map", slice(0, 10)),
    "map_50": _box_metric("map_50", slice(0, 1)),
    "map_75": _box_metric("map_75", slice(5, 6)),
}
"""As COCO's own script counts them."""


class ObjectDetection(Task):
    """Object detection."""

    model = ORTModelForObjectDetection

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_pictures(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Detections
