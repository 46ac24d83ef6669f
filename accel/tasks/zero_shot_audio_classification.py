"""Audio classification with labels that are named at call time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..capture.sound_text_samples import sound_text_sample
from ..data.batches import Encoded
from ..data.rows import Rows
from ..data.sounds import encode_sounds_with_texts
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Predictor
from ..measuring.accuracy.sounds import SoundCandidates
from ..models.base import ORTModel


@dataclass
class AudioTextOutput(ModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """What a model of sounds and texts returns.

    Attributes:
        logits_per_audio: `(batch, texts)`
        logits_per_text: `(texts, batch)`
        text_embeds: `(texts, projection)`
        audio_embeds: `(batch, projection)`
    """

    logits_per_audio: torch.Tensor | None = None
    logits_per_text: torch.Tensor | None = None
    text_embeds: torch.Tensor | None = None
    audio_embeds: torch.Tensor | None = None


class ORTModelForZeroShotAudioClassification(ORTModel):
    """Sounds compared with texts: `logits_per_audio: (batch, texts)`."""

    task = "zero-shot-audio-classification"
    output_class = AudioTextOutput

    def forward(self, input_ids: Any = None, input_features: Any = None, **inputs: Any) -> Any:
        """Run the graph on `input_ids: (texts, sequence)` and `input_features: (batch, channels, frames, bins)`."""
        return self._run({"input_ids": input_ids, "input_features": input_features, **inputs})


class ZeroShotAudioClassification(Task):
    """Audio classification with labels that are named at call time."""

    model = ORTModelForZeroShotAudioClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return sound_text_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_sounds_with_texts(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return SoundCandidates
