"""Task `zero-shot-object-detection`: detection of objects whose names are passed with each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..capture.image_text_samples import detection_sample
from ..data.columns import inner
from ..data.encoded_rows import EncodedRows
from ..data.image_rows import rgb_images, tokenized
from ..data.labels import candidate_texts
from ..data.rows import DatasetRows
from ..errors import InputError
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.modality_models import ImageTextSimilarityModel
from .object_detection import DetectionPredictor, ObjectDetectionOutput, categories


class ORTModelForZeroShotObjectDetection(ImageTextSimilarityModel):
    """Model that detects the objects that are named by texts.

    Outputs are `logits: (batch, queries, texts per image)` and `pred_boxes: (batch, queries, 4)`. Grounding DINO needs one text per image
    and returns a logit for each token of the text: `logits: (batch, queries, max_text_len)`.
    """

    task = "zero-shot-object-detection"
    output_class = ObjectDetectionOutput

    def forward(self, input_ids: Any = None, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on `pixel_values: (batch, channels, height, width)` and `input_ids: (texts, sequence)`.

        Each image needs the same number of texts; the texts of the first image come before the texts of the second image.

        Raises:
            InputError: The number of texts is not a multiple of the number of images.
        """
        images, texts = (len(values) if getattr(values, "ndim", 0) else 0 for values in (pixel_values, input_ids))
        if images and texts % images:
            raise InputError(
                f"input_ids contains {texts} texts for {images} images, but each image needs the same number of texts.",
                fix="pass one list of texts for each image to the processor: processor(text=[[...], ...], images=[...]).",
            )
        return super().forward(input_ids, pixel_values, **inputs)


def _with_each(rows: DatasetRows, processor: Any, candidates: Sequence[str], max_length: int | None) -> EncodedRows:
    """Encode each image as a separate batch, in which each row is the image with one of the texts.

    transformers' pipeline for zero-shot detection also processes one image and one text at a time.
    """
    tokens = tokenized(processor, candidates, max_length)

    def each(pictures: Sequence[Any], return_tensors: str) -> dict[str, Any]:
        inputs = processor.image_processor(pictures, return_tensors=return_tensors)
        return {name: value.repeat_interleave(len(candidates), 0) for name, value in inputs.items()} | tokens

    return EncodedRows(media=(rgb_images(rows), each), alone=True)


def _names_in(features: Any) -> list[str]:
    """Return the class names of the first feature with class names, including nested features."""
    for feature in features.values():
        for candidate in (feature, inner(feature)):
            nested = _names_in(candidate) if isinstance(candidate, Mapping) else None
            names = getattr(candidate, "names", None) or nested
            if names:
                return list(names)
    return []


class ZeroShotDetectionPredictor(DetectionPredictor):
    """Predictor of boxes that searches each image for the class names of the data, one name at a time."""

    def _references(self) -> list[Any]:
        self._names = categories(self.rows)
        numbers = {name: number for number, name in enumerate(self._names)}
        self.config = SimpleNamespace(label2id=numbers, id2label=dict(enumerate(self._names)), num_labels=len(numbers))
        return super()._references()

    def _encode(self) -> EncodedRows:
        return self._encoded_for(self._names[0])

    def _encoded_for(self, name: str) -> EncodedRows:
        # Encode only one name per batch: padding of shorter names would change which tokens Grounding DINO combines into a phrase.
        return _with_each(self.rows, self.processor, [name], self.max_length)

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return the predicted boxes, one list per row."""
        predictions: list[list[Any]] = [[] for _ in range(len(self.rows))]
        for number, name in enumerate(self._names):
            self.encoded = self._encoded_for(name)
            for row, boxes_of_row in zip(predictions, super().predict(model, what), strict=True):
                row += [(number, *box[1:]) for box in boxes_of_row]
        return predictions

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        answers: Sequence[Any] = self.processor.image_processor.post_process_object_detection(
            output, threshold=0.0, target_sizes=torch.tensor(sizes)
        )
        return answers


class ZeroShotObjectDetection(Task):
    """The task `zero-shot-object-detection`: detection of objects whose names are passed with each call."""

    model = ORTModelForZeroShotObjectDetection

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return detection_sample(module, folder)

    def encode(self, rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:
        return _with_each(rows, processor, candidate_texts(rows, _names_in), max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return ZeroShotDetectionPredictor

    def tiny_batch(self, config: Any, rows: int, draw: torch.Generator, texts: Any) -> dict[str, torch.Tensor]:
        images = {"pixel_values": torch.randn((rows, 3, 32, 32), generator=draw)}
        return {**texts(2 * rows, padded=False), **images}
