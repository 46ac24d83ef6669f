"""Task `audio-frame-classification`: labels for each frame of a sound, such as the active speaker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..data.labels import IGNORED, label_ids
from ..errors import InputError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Values, metric_of_sums, ratio
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.modality_models import SoundModel


class ORTModelForAudioFrameClassification(SoundModel):
    """Model that classifies each frame of a sound, for example by speaker: `logits: (batch, frames, num_labels)`."""

    task = "audio-frame-classification"


def _frame_sums(predictions: Values, references: Values) -> Floats:
    rows = []
    for predicted, true in zip(predictions, references, strict=True):
        a, b = np.asarray(predicted), np.asarray(true)
        rows.append((int(((a == b) & (b != IGNORED)).sum()), int((b != IGNORED).sum())))
    return np.asarray(rows, np.float64)


_ACCURACY = metric_of_sums("accuracy", _frame_sums, {"accuracy": ratio})


class FramePredictor(Predictor):
    """Predictor of the class id of each frame of a sound."""

    kind = "frames"
    offline_metrics = (_ACCURACY,)

    def _references(self) -> list[Any]:
        return label_ids(self.rows, "tags", self.config)

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return the class ids of the frames, one list per row.

        Raises:
            InputError: In a row, the number of labels differs from the number of frames.
        """
        return self._by_row(model, what, self._frames)

    def _frames(self, logits: torch.Tensor, part: Sequence[int]) -> list[list[int]]:
        for row in part:
            if len(self.references[row]) != logits.shape[1]:
                raise InputError(
                    f"Row {row} of the data has {len(self.references[row])} labels, but the model returns {logits.shape[1]} frames for "
                    "its sound.",
                    fix="change the data, so that each row has one label for each frame of the model's output.",
                )
        classes: list[list[int]] = logits.argmax(-1).tolist()
        return classes

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Return the fraction of frames for which two models predict the same class."""
        return super().agreement([frame for row in first for frame in row], [frame for row in second for frame in row])


class AudioFrameClassification(Task):
    """The task `audio-frame-classification`: labels for each frame of a sound."""

    model = ORTModelForAudioFrameClassification

    def predictor(self, config: Any) -> type[Predictor]:
        return FramePredictor
