"""Metrics of what models see in images: boxes, areas, depths, pixels. Defined as COCO's, ADE20K's and NYU's own scripts do.

What is counted of a row is counted when it is predicted, so that no map is kept: see the predictors in `pictures`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .metrics import Floats, Metric, Values

THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""COCO's overlaps from which on a box counts as found."""
_RECALLS = np.linspace(0, 1, 101)
_MOST_BOXES = 100  # of a class in an image

# Boxes: predictions are `(label, score, left, top, right, bottom)`, references `(label, left, top, right, bottom, crowd)`.


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


def _boxes(name: str, part: slice) -> Metric:
    def compute(predictions: Values, references: Values) -> dict[str, float]:
        (values,) = _precision(predictions, references)(np.ones((1, len(references))))
        return {"map": float(values.mean()), "map_50": float(values[0]), "map_75": float(values[5])}

    def resampled(predictions: Values, references: Values) -> Callable[[Floats], Floats]:
        average = _precision(predictions, references)
        return lambda weights: average(weights)[:, part].mean(1)

    return Metric(name=name, key=name, compute=compute, resampled=resampled)


# Areas: predictions are `(class, pixels that are right, that were predicted, that are true)`, an entry a class.


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
    return np.divide(shares.sum(-1), count, out=np.full_like(count, np.nan), where=count > 0)


def _area_metric(name: str) -> Metric:
    def compute(predictions: Values, references: Values) -> dict[str, float]:
        sums = _areas(predictions, references).sum(0)
        return {which: float(_share(sums, which)) for which in ("mean_iou", "pixel_accuracy", "mean_accuracy")}

    return Metric(name=name, key=name, compute=compute, sums=_areas, finish=lambda sums: _share(sums, name))


# Depths: predictions are `(relative error, share within a quarter, squared error)`, each the mean over a row's pixels.

_DEPTH = ("abs_rel", "delta1", "rmse")


def _depths(predictions: Values, _: Values) -> Floats:
    found = np.asarray(predictions, np.float64).reshape(-1, len(_DEPTH))
    return np.concatenate([found, np.ones((len(found), 1))], 1)


def _depth(sums: Floats, place: int) -> Floats:
    mean: Floats = sums[..., place] / sums[..., -1]
    return np.sqrt(mean) if _DEPTH[place] == "rmse" else mean


def _depth_metric(name: str) -> Metric:
    def compute(predictions: Values, references: Values) -> dict[str, float]:
        sums = _depths(predictions, references).sum(0)
        return {which: float(_depth(sums, i)) for i, which in enumerate(_DEPTH)}

    place = _DEPTH.index(name)
    return Metric(
        name=name, key=name, compute=compute, sums=_depths, finish=lambda sums: _depth(sums, place),
        higher_is_better=name == "delta1", points=1.0 if name == "rmse" else 100.0,
    )  # fmt: skip


# Pixels: predictions are decibels.


def _decibels(predictions: Values, _: Values) -> dict[str, float]:
    return {"psnr": float(np.mean(np.asarray(predictions, np.float64)))}


def _decibel_sums(predictions: Values, _: Values) -> Floats:
    found = np.asarray(predictions, np.float64)
    return np.stack([found, np.ones_like(found)], 1)


METRICS: Mapping[str, Metric] = {
    "map": _boxes("map", slice(0, 10)),
    "map_50": _boxes("map_50", slice(0, 1)),
    "map_75": _boxes("map_75", slice(5, 6)),
    **{name: _area_metric(name) for name in ("mean_iou", "pixel_accuracy", "mean_accuracy")},
    **{name: _depth_metric(name) for name in _DEPTH},
    "psnr": Metric(
        name="psnr", key="psnr", compute=_decibels, sums=_decibel_sums, points=1.0,
        finish=lambda sums: sums[..., 0] / sums[..., 1],
    ),
}  # fmt: skip
"""By the names of `metrics.OFFERED`."""


def of_images(name: str) -> Metric:
    """The metric of that name."""
    return METRICS[name]
