"""Labels of each frame of a sound: who speaks when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.sound_samples import sound_sample
from ..data.batches import Encoded
from ..data.rows import Rows
from ..data.sounds import encode_sounds
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Predictor
from ..measuring.accuracy.sounds import Frames
from ..models.modality_models import SoundModel


class ORTModelForAudioFrameClassification(SoundModel):
    """A class for each frame, such as who speaks: `logits: (batch, frames, num_labels)`."""

    task = "audio-frame-classification"


class AudioFrameClassification(Task):
    """Labels of each frame of a sound: who speaks when."""

    model = ORTModelForAudioFrameClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return sound_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_sounds(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Frames
