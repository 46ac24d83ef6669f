"""Task `audio-classification`: one class per sound."""

from __future__ import annotations

from typing import Any

from ..interfaces.task import Task
from ..measuring.accuracy.predictors import ClassPredictor, Predictor
from ..models.modality_models import SoundModel


class ORTModelForAudioClassification(SoundModel):
    """Model that classifies sounds: `logits: (batch, num_labels)`."""

    task = "audio-classification"


class AudioClassification(Task):
    """The task `audio-classification`."""

    model = ORTModelForAudioClassification

    def predictor(self, config: Any) -> type[Predictor]:
        return ClassPredictor
