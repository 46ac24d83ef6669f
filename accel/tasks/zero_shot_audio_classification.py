"""Task `zero-shot-audio-classification`: audio classification with labels that are passed with each call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..capture.sound_text_samples import sound_text_sample
from ..data.encoded_rows import EncodedRows
from ..data.image_rows import tokenized
from ..data.labels import candidate_texts
from ..data.rows import DatasetRows
from ..data.sound_rows import encode_sounds
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Predictor, ZeroShotPredictor
from ..models.base import ORTModel


@dataclass
class AudioTextOutput(ModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """Output of a model that compares sounds with texts.

    Attributes:
        logits_per_audio: Similarity logits `(batch, texts)`.
        logits_per_text: Similarity logits `(texts, batch)`.
        text_embeds: Text embeddings `(texts, projection)`.
        audio_embeds: Audio embeddings `(batch, projection)`.
    """

    logits_per_audio: torch.Tensor | None = None
    logits_per_text: torch.Tensor | None = None
    text_embeds: torch.Tensor | None = None
    audio_embeds: torch.Tensor | None = None


class ORTModelForZeroShotAudioClassification(ORTModel):
    """Model that compares sounds with texts: `logits_per_audio: (batch, texts)`."""

    task = "zero-shot-audio-classification"
    output_class = AudioTextOutput

    def forward(self, input_ids: Any = None, input_features: Any = None, **inputs: Any) -> Any:
        """Run the graph on `input_ids: (texts, sequence)` and `input_features: (batch, channels, frames, bins)`."""
        return self._run({"input_ids": input_ids, "input_features": input_features, **inputs})


class ZeroShotSoundPredictor(ZeroShotPredictor):
    """Predictor of the class of each sound. The model compares the sound with one text for each class name."""

    template = "This is a sound of {}."
    output = "logits_per_audio"

    @staticmethod
    def encode(rows: DatasetRows, processor: Any, candidates: Sequence[str], max_length: int | None) -> EncodedRows:
        """Encode the sounds and the texts of the classes. Every batch contains the texts of all classes."""
        return encode_sounds(rows, processor, None).with_inputs(tokenized(processor, candidates, max_length))


class ZeroShotAudioClassification(Task):
    """The task `zero-shot-audio-classification`: audio classification with labels that are passed with each call."""

    model = ORTModelForZeroShotAudioClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return sound_text_sample(module, folder)

    def encode(self, rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:
        return ZeroShotSoundPredictor.encode(rows, processor, candidate_texts(rows), max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return ZeroShotSoundPredictor

    def tiny_batch(self, config: Any, rows: int, draw: torch.Generator, texts: Any) -> dict[str, torch.Tensor]:
        sounds = {"input_features": torch.randn((rows, 1, 201, 16), generator=draw)}
        return {**texts(rows + 1, padded=False), **sounds}
