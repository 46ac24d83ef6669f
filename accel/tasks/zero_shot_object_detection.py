"""Detection of objects that are named at call time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.image_text_samples import detection_sample
from ..data.batches import Encoded
from ..data.pictures import encode_images_with_each_text
from ..data.rows import Rows
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.pictures import DetectionsByName
from ..measuring.accuracy.predictors import Predictor
from ..models.images import ORTModelForZeroShotObjectDetection


class ZeroShotObjectDetection(Task):
    """Detection of objects that are named at call time."""

    model = ORTModelForZeroShotObjectDetection

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return detection_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_images_with_each_text(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return DetectionsByName
