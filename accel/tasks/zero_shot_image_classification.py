"""Image classification with labels that are named at call time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..capture.image_text_samples import image_text_sample
from ..data.batches import Encoded
from ..data.pictures import encode_images_with_texts
from ..data.rows import Rows
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.pictures import Candidates
from ..measuring.accuracy.predictors import Predictor
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


class ZeroShotImageClassification(Task):
    """Image classification with labels that are named at call time."""

    model = ORTModelForZeroShotImageClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return image_text_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_images_with_texts(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Candidates
