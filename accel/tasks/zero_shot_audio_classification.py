"""Audio classification with labels that are named at call time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.sound_text_samples import sound_text_sample
from ..data.batches import Encoded
from ..data.rows import Rows
from ..data.sounds import encode_sounds_with_texts
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Predictor
from ..measuring.accuracy.sounds import SoundCandidates
from ..models.audio import ORTModelForZeroShotAudioClassification


class ZeroShotAudioClassification(Task):
    """Audio classification with labels that are named at call time."""

    model = ORTModelForZeroShotAudioClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return sound_text_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_sounds_with_texts(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return SoundCandidates
