"""Embeddings of voices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.sound_samples import sound_sample
from ..capture.x_vectors import VoiceEmbedder
from ..data.batches import Encoded
from ..data.rows import Rows
from ..data.sounds import encode_sounds
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Predictor
from ..measuring.accuracy.sounds import Voices
from ..models.modality_models import SoundModel


class ORTModelForAudioXVector(SoundModel):
    """Voices: `embeddings: (batch, xvector_output_dim)` to compare by their cosine, and `logits: (batch, speakers)`."""

    task = "audio-xvector"


class AudioXvector(Task):
    """Embeddings of voices."""

    model = ORTModelForAudioXVector

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return sound_sample(module, folder)

    def traced(self, module: Any) -> Any:
        return VoiceEmbedder(module)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_sounds(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Voices
