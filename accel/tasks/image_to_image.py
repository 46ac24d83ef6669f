"""Task `image-to-image`: generation of an image from an image, such as a larger image (super resolution)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..data.image_rows import pixels
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Values, metric_of_sums, ratio
from ..measuring.accuracy.picture_predictor import PicturePredictor, sizes_differ
from ..measuring.accuracy.predictors import Predictor
from ..models.modality_models import ImageModel


class ORTModelForImageToImage(ImageModel):
    """Model that generates an image from an image, such as a larger image: `reconstruction: (batch, channels, height, width)`."""

    task = "image-to-image"


_MOST_DECIBELS = 100.0  # used instead of infinity, the PSNR of two equal images


def _decibel_sums(predictions: Values, _: Values) -> Floats:
    decibels = np.asarray(predictions, np.float64)
    return np.stack([decibels, np.ones_like(decibels)], 1)


_PSNR = metric_of_sums("psnr", _decibel_sums, {"psnr": ratio}, points=1.0)


class PsnrPredictor(PicturePredictor):
    """Predictor of the peak signal-to-noise ratio (PSNR) of each generated image compared with its reference, in decibels."""

    kind = "pixels"
    use = "target"
    offline_metrics = (_PSNR,)

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        times = output.scale
        return [
            image[:, : height * times, : width * times].clamp(0, 1)
            for image, (height, width) in zip(output.reconstruction, sizes, strict=True)
        ]

    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        true = pixels(truth.convert("RGB") if hasattr(truth, "convert") else truth).astype(np.float64) / 255
        values = np.moveaxis(answer.numpy(), 0, -1)
        if true.shape != values.shape:
            raise sizes_differ("target", row, true.shape[:2], values.shape[:2])
        error = float(((values - true) ** 2).mean())
        return min(-10 * float(np.log10(error)), _MOST_DECIBELS) if error > 0 else _MOST_DECIBELS


class ImageToImage(Task):
    """The task `image-to-image`: generation of an image from an image, such as the same image with a higher resolution."""

    model = ORTModelForImageToImage

    def predictor(self, config: Any) -> type[Predictor]:
        return PsnrPredictor

    def pipeline(self, name: str) -> type[Any]:
        from .image_to_image_pipeline import ImageToImagePipeline

        return ImageToImagePipeline
