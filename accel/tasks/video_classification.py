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
from ..models.videos import ORTModelForVideoClassification


class VideoClassification(Task):
    """Video classification."""

    model = ORTModelForVideoClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return video_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_videos(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Classes
