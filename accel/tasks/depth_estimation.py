"""Depth of each pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..data.batches import Encoded
from ..data.image_rows import encode_pictures, one_channel
from ..data.rows import Rows
from ..errors import InputError
from ..interfaces.family_registry import family_of
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Metric, Values
from ..measuring.accuracy.picture_predictor import PicturePredictor, sizes_differ
from ..measuring.accuracy.predictors import Predictor
from ..models.modality_models import ImageModel


class ORTModelForDepthEstimation(ImageModel):
    """How far away each pixel is: `predicted_depth: (batch, height, width)`."""

    task = "depth-estimation"


class Depths(PicturePredictor):
    """How far an image's depths are from the true ones: relative error, share within a quarter, squared error.

    Depths are compared in the data's unit, where the model estimates them (`depth_estimation_type` "metric", GLPN, ZoeDepth,
    DepthPro). Models of relative depth (MiDaS' DPT, Depth Anything) return the inverse of depth up to a factor and a summand,
    which are fitted to each row first, as Ranftl et al. (2020), Towards Robust Monocular Depth Estimation, do.
    """

    kind = "depths"
    use = "depth"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {name: _depth_metric(name) for name in _METRICS}

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        found = self.processor.post_process_depth_estimation(output, list(sizes))
        return [one["predicted_depth"] for one in found]

    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        picture = one_channel(truth, row, "depths")
        true = picture.astype(np.float64)
        relative = _estimates_relative_depth(self.config)
        if picture.dtype.kind in "iu" and not relative:
            raise InputError(
                f"The depths of row {row} are whole numbers, whose unit is not known; the model estimates metres.",
                fix="give floating-point depths in metres.",
            )
        if true.shape != size:
            raise sizes_differ("depth map", row, true.shape, size)
        seen = np.isfinite(true) & (true > 0)
        if not seen.any():
            raise InputError(f"No pixel of the depth map of row {row} has a depth.", fix="leave the row out.")
        found, true = answer.numpy().astype(np.float64)[seen], true[seen]
        if relative:
            found = _fitted(found, true)
        ratio = np.divide(found, true)
        within = (ratio < 1.25) & (ratio > 1 / 1.25)
        return (float(np.abs(ratio - 1).mean()), float(within.mean()), float(((found - true) ** 2).mean()))


def _estimates_relative_depth(config: Any) -> bool:
    said = getattr(config, "depth_estimation_type", None)
    return said == "relative" if said is not None else not family_of(config).metric_depth


def _fitted(inverse: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Depths of relative inverse depths, by the factor and the summand that fit the true ones best; none is farther than these."""
    columns = np.stack([inverse, np.ones_like(inverse)], 1)
    (factor, summand), *_ = np.linalg.lstsq(columns, 1 / true, rcond=None)
    depths: np.ndarray = 1 / np.maximum(factor * inverse + summand, 1 / true.max())
    return depths


_METRICS = ("abs_rel", "delta1", "rmse")


def _depths(predictions: Values, _: Values) -> Floats:
    found = np.asarray(predictions, np.float64).reshape(-1, len(_METRICS))
    return np.concatenate([found, np.ones((len(found), 1))], 1)


def _depth(sums: Floats, place: int) -> Floats:
    mean: Floats = sums[..., place] / sums[..., -1]
    if _METRICS[place] == "rmse":
        mean = np.sqrt(mean)
    return mean


def _depth_metric(name: str) -> Metric:
    def compute(predictions: Values, references: Values) -> dict[str, float]:
        sums = _depths(predictions, references).sum(0)
        return {which: float(_depth(sums, i)) for i, which in enumerate(_METRICS)}

    place = _METRICS.index(name)
    return Metric(
        name=name, key=name, compute=compute, sums=_depths, finish=lambda sums: _depth(sums, place),
        higher_is_better=name == "delta1", points=1.0 if name == "rmse" else 100.0,
    )  # fmt: skip


class DepthEstimation(Task):
    """Depth of each pixel."""

    model = ORTModelForDepthEstimation

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_pictures(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Depths
