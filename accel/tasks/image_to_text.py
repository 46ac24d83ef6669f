"""Captions of images."""

from __future__ import annotations

from typing import Any

from ..data.batches import Encoded, encode_images
from ..data.rows import Rows
from ..interfaces.task import Task
from ..models.encoder_decoder import EncoderDecoder


class ORTModelForVision2Seq(EncoderDecoder):
    """Captions and text recognition: `pixel_values` to text, or `flattened_patches` of Pix2Struct."""

    task = "image-to-text"


class ImageToText(Task):
    """Captions of images."""

    model = ORTModelForVision2Seq

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_images(rows, processor, max_length)

    def pipeline(self, name: str) -> type[Any]:
        from .image_to_text_pipeline import ImageToTextPipeline

        return ImageToTextPipeline
