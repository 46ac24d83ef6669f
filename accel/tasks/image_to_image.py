"""Images to larger images."""

from __future__ import annotations

from typing import Any

from ..data.batches import Encoded
from ..data.pictures import encode_pictures
from ..data.rows import Rows
from ..interfaces.task import Task
from ..measuring.accuracy.pictures import Pixels
from ..measuring.accuracy.predictors import Predictor
from ..models.modality_models import ImageModel


class ORTModelForImageToImage(ImageModel):
    """Images made of images, such as larger ones: `reconstruction: (batch, channels, height, width)`."""

    task = "image-to-image"


class ImageToImage(Task):
    """Images to larger images."""

    model = ORTModelForImageToImage

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_pictures(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Pixels

    def pipeline(self, name: str) -> type[Any]:
        from ..models.pipelines.image_to_image import ImageToImagePipeline

        return ImageToImagePipeline
