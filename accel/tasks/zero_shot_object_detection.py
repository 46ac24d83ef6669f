"""Detection of objects that are named at call time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..capture.image_text_samples import detection_sample
from ..data.batches import Encoded, images_of
from ..data.columns import inner
from ..data.image_rows import tokenized
from ..data.labels import candidate_texts
from ..data.rows import Rows
from ..errors import InputError
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.base import ORTModel
from .object_detection import Detections, ObjectDetectionOutput, categories


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


def _with_each(rows: Rows, processor: Any, candidates: Sequence[str], max_length: int | None) -> Encoded:
    """Images alone, each as often as there are texts, which stand beside it: an image and a text at a time, as transformers'
    pipeline for zero-shot detection asks.
    """
    tokens = tokenized(processor, candidates, max_length)

    def each(pictures: Sequence[Any], return_tensors: str) -> dict[str, Any]:
        made = processor.image_processor(pictures, return_tensors=return_tensors)
        return {name: value.repeat_interleave(len(candidates), 0) for name, value in made.items()} | tokens

    return Encoded(images=(images_of(rows), each), alone=True)


def _names_in(features: Any) -> list[str]:
    """The names of the first classes among features, or inside of one."""
    for feature in features.values():
        for one in (feature, inner(feature)):
            names = getattr(one, "names", None) or (_names_in(one) if isinstance(one, Mapping) else None)
            if names:
                return list(names)
    return []


class DetectionsByName(Detections):
    """The same of the data's classes, by their names alone: an image and a name at a time."""

    def _references(self) -> list[Any]:
        self._names = categories(self.rows)
        numbers = {name: number for number, name in enumerate(self._names)}
        self.config = SimpleNamespace(label2id=numbers, id2label=dict(enumerate(self._names)), num_labels=len(numbers))
        return super()._references()

    def _encode(self) -> Encoded:
        return self._encoded_for(self._names[0])

    def _encoded_for(self, name: str) -> Encoded:
        # Padding changes which of its tokens Grounding DINO takes for one phrase.
        return _with_each(self.rows, self.processor, [name], self.max_length)

    def predict(self, model: Model, what: str) -> list[Any]:
        """Boxes, a list a row."""
        found: list[list[Any]] = [[] for _ in range(len(self.rows))]
        for number, name in enumerate(self._names):
            self.encoded = self._encoded_for(name)
            for row, boxes_of_row in zip(found, super().predict(model, what), strict=True):
                row += [(number, *box[1:]) for box in boxes_of_row]
        return found

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        found: Sequence[Any] = self.processor.image_processor.post_process_object_detection(
            output, threshold=0.0, target_sizes=torch.tensor(sizes)
        )
        return found


class ZeroShotObjectDetection(Task):
    """Detection of objects that are named at call time."""

    model = ORTModelForZeroShotObjectDetection

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return detection_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return _with_each(rows, processor, candidate_texts(rows, _names_in), max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return DetectionsByName
