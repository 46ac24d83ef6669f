"""Detection of objects that are named at call time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.image_text_samples import detection_sample
from ..data.batches import Encoded
from ..data.pictures import encode_images_with_each_text
from ..data.rows import Rows
from ..errors import InputError
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.pictures import DetectionsByName
from ..measuring.accuracy.predictors import Predictor
from ..models.base import ORTModel
from .object_detection import ObjectDetectionOutput


class ORTModelForZeroShotObjectDetection(ORTModel):
    """Objects that texts name: `logits: (batch, queries, texts of an image)` and `pred_boxes: (batch, queries, 4)`.

    Grounding DINO reads one text an image, of which it scores each token: `logits: (batch, queries, max_text_len)`.
    """

    task = "zero-shot-object-detection"
    output_class = ObjectDetectionOutput

    def forward(self, input_ids: Any = None, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on `pixel_values: (batch, channels, height, width)` and `input_ids: (texts, sequence)`: as many texts
        for each image, those of the first image before those of the second.

        Raises:
            InputError: Images that cannot have as many texts each.
        """
        images, texts = (len(one) if getattr(one, "ndim", 0) else 0 for one in (pixel_values, input_ids))
        if images and texts % images:
            raise InputError(
                f"{texts} texts came for {images} images; each image has as many.",
                fix="repeat the texts for each image, as the processor does: processor(text=[[...], ...], images=[...]).",
            )
        return self._run({"input_ids": input_ids, "pixel_values": pixel_values, **inputs})


class ZeroShotObjectDetection(Task):
    """Detection of objects that are named at call time."""

    model = ORTModelForZeroShotObjectDetection

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return detection_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_images_with_each_text(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return DetectionsByName
