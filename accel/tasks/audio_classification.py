"""Audio classification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.sound_samples import sound_sample
from ..data.batches import Encoded
from ..data.rows import Rows
from ..data.sound_rows import encode_sounds
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Classes, Predictor
from ..models.modality_models import SoundModel


class ORTModelForAudioClassification(SoundModel):
    """Sounds to classes: `logits: (batch, num_labels)`."""

    task = "audio-classification"


class AudioClassification(Task):
    """Audio classification."""

    model = ORTModelForAudioClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return sound_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_sounds(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Classes
