"""Task `zero-shot-image-classification`: image classification with labels that are passed with each call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..capture.image_text_samples import image_text_sample
from ..data.encoded_rows import EncodedRows
from ..data.image_rows import encode_images, tokenized
from ..data.labels import candidate_texts
from ..data.rows import DatasetRows
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Predictor, ZeroShotPredictor
from ..models.modality_models import ImageTextSimilarityModel


@dataclass
class ImageTextOutput(ModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """Output of a model that compares images with texts.

    Attributes:
        logits_per_image: Similarity logits `(batch, texts)`.
        logits_per_text: Similarity logits `(texts, batch)`.
        image_embeds: Image embeddings `(batch, projection)`.
        text_embeds: Text embeddings `(texts, projection)`.
    """

    logits_per_image: torch.Tensor | None = None
    logits_per_text: torch.Tensor | None = None
    image_embeds: torch.Tensor | None = None
    text_embeds: torch.Tensor | None = None


class ORTModelForZeroShotImageClassification(ImageTextSimilarityModel):
    """Model that compares images with texts: `logits_per_image: (batch, texts)`."""

    task = "zero-shot-image-classification"
    output_class = ImageTextOutput


class ZeroShotImagePredictor(ZeroShotPredictor):
    """Predictor of the class of each image. The model compares the image with one text for each class name."""

    template = "This is a photo of {}."
    output = "logits_per_image"

    @staticmethod
    def encode(rows: DatasetRows, processor: Any, candidates: Sequence[str], max_length: int | None) -> EncodedRows:
        """Encode the images and the texts of the classes. Every batch contains the texts of all classes."""
        images = encode_images(rows, processor.image_processor, None)
        return images.with_inputs(tokenized(processor, candidates, max_length))


class ZeroShotImageClassification(Task):
    """The task `zero-shot-image-classification`: image classification with labels that are passed with each call."""

    model = ORTModelForZeroShotImageClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return image_text_sample(module, folder)

    def encode(self, rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:
        return ZeroShotImagePredictor.encode(rows, processor, candidate_texts(rows), max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return ZeroShotImagePredictor

    def tiny_batch(self, config: Any, rows: int, draw: torch.Generator, texts: Any) -> dict[str, torch.Tensor]:
        images = {"pixel_values": torch.randn((rows, 3, 32, 32), generator=draw)}
        return {**texts(rows + 1, padded=False), **images}
