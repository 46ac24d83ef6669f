"""Task `depth-estimation`: a depth value for each pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..data.image_rows import one_channel
from ..errors import InputError
from ..interfaces.family_registry import family_of
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Values, metric_of_sums
from ..measuring.accuracy.picture_predictor import PicturePredictor, sizes_differ
from ..measuring.accuracy.predictors import Predictor
from ..models.modality_models import ImageModel


class ORTModelForDepthEstimation(ImageModel):
    """Model that estimates the depth of each pixel: `predicted_depth: (batch, height, width)`."""

    task = "depth-estimation"


def _depths(predictions: Values, _: Values) -> Floats:
    means = np.asarray(predictions, np.float64).reshape(-1, 3)
    return np.concatenate([means, np.ones((len(means), 1))], 1)


_SCORES: Mapping[str, Callable[[Floats], Floats]] = {
    "abs_rel": lambda sums: sums[..., 0] / sums[..., -1],
    "delta1": lambda sums: sums[..., 1] / sums[..., -1],
    "rmse": lambda sums: np.sqrt(sums[..., 2] / sums[..., -1]),
}


class DepthErrorPredictor(PicturePredictor):
    """Predictor of three values of each image's depth map, compared with the true depth map.

    The values are the mean relative error, the fraction of pixels within a factor of 1.25, and the mean squared error.

    Models of metric depth (`depth_estimation_type` "metric", GLPN, ZoeDepth, DepthPro) are compared in the unit of the data. Models of
    relative depth (MiDaS' DPT, Depth Anything) return inverse depth with an unknown scale and shift. The predictor fits scale and shift to
    each row before the comparison, as in Ranftl et al. (2020), Towards Robust Monocular Depth Estimation.
    """

    kind = "depths"
    use = "depth"
    offline_metrics = (
        metric_of_sums("abs_rel", _depths, _SCORES, higher_is_better=False),
        metric_of_sums("delta1", _depths, _SCORES, key="delta1"),
        metric_of_sums("rmse", _depths, _SCORES, key="rmse", points=1.0, higher_is_better=False),
    )

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        depths = self.processor.post_process_depth_estimation(output, list(sizes))
        return [depth["predicted_depth"] for depth in depths]

    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        picture = one_channel(truth, row, "depths")
        true = picture.astype(np.float64)
        relative = _estimates_relative_depth(self.config)
        if picture.dtype.kind in "iu" and not relative:
            raise InputError(
                f"The depth map of row {row} contains integers, whose unit is unknown; the model estimates depths in metres.",
                fix="convert the depth maps to floating-point values in metres.",
            )
        if true.shape != size:
            raise sizes_differ("depth map", row, true.shape, size)
        has_depth = np.isfinite(true) & (true > 0)
        if not has_depth.any():
            raise InputError(
                f"The depth map of row {row} has no pixel with a finite depth above 0, so there is nothing to measure.",
                fix=f"remove row {row} from the data.",
            )
        estimated, true = answer.numpy().astype(np.float64)[has_depth], true[has_depth]
        if relative:
            estimated = _fitted(estimated, true)
        ratio = np.divide(estimated, true)
        within = (ratio < 1.25) & (ratio > 1 / 1.25)
        return (float(np.abs(ratio - 1).mean()), float(within.mean()), float(((estimated - true) ** 2).mean()))


def _estimates_relative_depth(config: Any) -> bool:
    kind = getattr(config, "depth_estimation_type", None)
    return kind == "relative" if kind is not None else not family_of(config).metric_depth


def _fitted(inverse: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Convert relative inverse depths to depths: fit scale and shift by least squares, and limit depths to the largest true depth."""
    columns = np.stack([inverse, np.ones_like(inverse)], 1)
    (factor, summand), *_ = np.linalg.lstsq(columns, 1 / true, rcond=None)
    depths: np.ndarray = 1 / np.maximum(factor * inverse + summand, 1 / true.max())
    return depths


class DepthEstimation(Task):
    """The task `depth-estimation`: a depth value for each pixel."""

    model = ORTModelForDepthEstimation

    def predictor(self, config: Any) -> type[Predictor]:
        return DepthErrorPredictor
