"""Image classification with labels that are named at call time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.image_text_samples import image_text_sample
from ..data.batches import Encoded
from ..data.pictures import encode_images_with_texts
from ..data.rows import Rows
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.pictures import Candidates
from ..measuring.accuracy.predictors import Predictor
from ..models.images import ORTModelForZeroShotImageClassification


class ZeroShotImageClassification(Task):
    """Image classification with labels that are named at call time."""

    model = ORTModelForZeroShotImageClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return image_text_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_images_with_texts(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Candidates
