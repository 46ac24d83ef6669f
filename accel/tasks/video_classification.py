"""Video classification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.video_samples import video_sample
from ..data.batches import Encoded
from ..data.rows import Rows
from ..data.videos import encode_videos
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Classes, Predictor
from ..models.modality_models import ImageModel


class ORTModelForVideoClassification(ImageModel):
    """Videos to classes: `pixel_values: (batch, frames, channels, height, width)` to `logits: (batch, num_labels)`.

    V-JEPA 2 calls its frames `pixel_values_videos`.
    """

    task = "video-classification"

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """What it reads."""
        return ("video",)


class VideoClassification(Task):
    """Video classification."""

    model = ORTModelForVideoClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return video_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_videos(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Classes
