"""Image classification with labels that are named at call time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..capture.image_text_samples import image_text_sample
from ..data.batches import Encoded, images_of
from ..data.image_rows import makes_one_size, tokenized
from ..data.labels import candidate_texts
from ..data.rows import Rows
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Candidates, Predictor
from ..models.base import ORTModel


@dataclass
class ImageTextOutput(ModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """What a model of images and texts returns.

    Attributes:
        logits_per_image: `(batch, texts)`
        logits_per_text: `(texts, batch)`
        image_embeds: `(batch, projection)`
        text_embeds: `(texts, projection)`
    """

    logits_per_image: torch.Tensor | None = None
    logits_per_text: torch.Tensor | None = None
    image_embeds: torch.Tensor | None = None
    text_embeds: torch.Tensor | None = None


class ORTModelForZeroShotImageClassification(ORTModel):
    """Images compared with texts: `logits_per_image: (batch, texts)`."""

    task = "zero-shot-image-classification"
    output_class = ImageTextOutput

    def forward(self, input_ids: Any = None, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on `input_ids: (texts, sequence)` and `pixel_values: (batch, channels, height, width)`."""
        return self._run({"input_ids": input_ids, "pixel_values": pixel_values, **inputs})


def _beside(rows: Rows, processor: Any, candidates: Sequence[str], max_length: int | None) -> Encoded:
    """Images, with the same texts beside every batch of them."""
    tokens = tokenized(processor, candidates, max_length)

    def both(pictures: Sequence[Any], return_tensors: str) -> dict[str, Any]:
        return {**processor.image_processor(pictures, return_tensors=return_tensors), **tokens}

    return Encoded(images=(images_of(rows), both), alone=not makes_one_size(processor.image_processor))


class ImageCandidates(Candidates):
    """The likeliest of the data's classes for an image, by their names alone."""

    template = "This is a photo of {}."
    output = "logits_per_image"

    def _beside(self, candidates: Sequence[str]) -> Encoded:
        return _beside(self.rows, self.processor, candidates, self.max_length)


class ZeroShotImageClassification(Task):
    """Image classification with labels that are named at call time."""

    model = ORTModelForZeroShotImageClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return image_text_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return _beside(rows, processor, candidate_texts(rows), max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return ImageCandidates
