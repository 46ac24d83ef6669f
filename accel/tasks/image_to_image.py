"""Images to larger images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..data.batches import Encoded
from ..data.image_rows import encode_pictures, pixels
from ..data.rows import Rows
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Metric, Values, ratio
from ..measuring.accuracy.picture_predictor import PicturePredictor, sizes_differ
from ..measuring.accuracy.predictors import Predictor
from ..models.modality_models import ImageModel


class ORTModelForImageToImage(ImageModel):
    """Images made of images, such as larger ones: `reconstruction: (batch, channels, height, width)`."""

    task = "image-to-image"


_MOST_DECIBELS = 100.0  # of images that are equal, whose ratio has no bound


class Pixels(PicturePredictor):
    """How close an image is to the one that was wanted: its peak signal-to-noise ratio in decibels."""

    kind = "pixels"
    use = "target"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {"psnr": _PSNR}

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        times = output.scale
        return [
            one[:, : height * times, : width * times].clamp(0, 1)
            for one, (height, width) in zip(output.reconstruction, sizes, strict=True)
        ]

    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        true = pixels(truth.convert("RGB") if hasattr(truth, "convert") else truth).astype(np.float64) / 255
        found = np.moveaxis(answer.numpy(), 0, -1)
        if true.shape != found.shape:
            raise sizes_differ("target", row, true.shape[:2], found.shape[:2])
        error = float(((found - true) ** 2).mean())
        return min(-10 * float(np.log10(error)), _MOST_DECIBELS) if error > 0 else _MOST_DECIBELS


def _decibels(predictions: Values, _: Values) -> dict[str, float]:
    return {"psnr": float(np.mean(np.asarray(predictions, np.float64)))}


def _decibel_sums(predictions: Values, _: Values) -> Floats:
    found = np.asarray(predictions, np.float64)
    return np.stack([found, np.ones_like(found)], 1)


_PSNR = Metric(name="psnr", key="psnr", compute=_decibels, sums=_decibel_sums, points=1.0, finish=ratio)


class ImageToImage(Task):
    """Images to larger images."""

    model = ORTModelForImageToImage

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_pictures(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Pixels

    def pipeline(self, name: str) -> type[Any]:
        from .image_to_image_pipeline import ImageToImagePipeline

        return ImageToImagePipeline
