"""Task `image-to-text`: captions of images."""

from __future__ import annotations

from typing import Any

from ..interfaces.task import Task
from ..models.encoder_decoder import EncoderDecoder


class ORTModelForVision2Seq(EncoderDecoder):
    """Model for image captions and text recognition. Its input is `pixel_values`, or `flattened_patches` for Pix2Struct."""

    task = "image-to-text"


class ImageToText(Task):
    """The task `image-to-text`: captions of images."""

    model = ORTModelForVision2Seq

    def pipeline(self, name: str) -> type[Any]:
        from .image_to_text_pipeline import ImageToTextPipeline

        return ImageToTextPipeline
