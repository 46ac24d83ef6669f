"""Labels of each frame of a sound: who speaks when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..capture.sound_samples import sound_sample
from ..data.batches import Encoded
from ..data.labels import IGNORED, label_ids
from ..data.rows import Rows
from ..data.sound_rows import encode_sounds
from ..errors import InputError
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.metrics import Floats, Metric, Values, ratio
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.modality_models import SoundModel


class ORTModelForAudioFrameClassification(SoundModel):
    """A class for each frame, such as who speaks: `logits: (batch, frames, num_labels)`."""

    task = "audio-frame-classification"


class Frames(Predictor):
    """The likeliest class of each frame, as its number."""

    kind = "frames"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {"accuracy": _ACCURACY}

    def _references(self) -> list[Any]:
        return label_ids(self.rows, "tags", self.config)

    def predict(self, model: Model, what: str) -> list[Any]:
        """Class numbers, one list a row.

        Raises:
            InputError: A row has another number of labels than of frames.
        """
        return self._by_row(model, what, self._frames)

    def _frames(self, logits: torch.Tensor, part: Sequence[int]) -> list[list[int]]:
        for row in part:
            if len(self.references[row]) != logits.shape[1]:
                raise InputError(
                    f"Row {row} has {len(self.references[row])} labels, and the model answers with {logits.shape[1]} frames.",
                    fix="give one label for each of the model's frames.",
                )
        found: list[list[int]] = logits.argmax(-1).tolist()
        return found

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Share of frames."""
        return super().agreement([one for row in first for one in row], [one for row in second for one in row])


def _frame_sums(predictions: Values, references: Values) -> Floats:
    rows = []
    for found, true in zip(predictions, references, strict=True):
        a, b = np.asarray(found), np.asarray(true)
        rows.append((int(((a == b) & (b != IGNORED)).sum()), int((b != IGNORED).sum())))
    return np.asarray(rows, np.float64)


def _frame_accuracy(predictions: Values, references: Values) -> dict[str, float]:
    return {"accuracy": float(ratio(_frame_sums(predictions, references).sum(0)))}


_ACCURACY = Metric(name="accuracy", key="accuracy", compute=_frame_accuracy, sums=_frame_sums, finish=ratio)


class AudioFrameClassification(Task):
    """Labels of each frame of a sound: who speaks when."""

    model = ORTModelForAudioFrameClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return sound_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_sounds(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Frames
