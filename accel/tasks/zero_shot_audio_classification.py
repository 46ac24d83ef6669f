"""Audio classification with labels that are named at call time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..capture.sound_text_samples import sound_text_sample
from ..data.batches import Encoded
from ..data.image_rows import tokenized
from ..data.labels import candidate_texts
from ..data.rows import Rows
from ..data.sound_rows import Sounds, Wave, encode_sounds
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Candidates, Predictor
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


def _beside(rows: Rows, processor: Any, candidates: Sequence[str], max_length: int | None) -> Encoded:
    """Sounds, with the same texts beside every batch of them."""
    made = encode_sounds(rows, processor, None)
    assert isinstance(made, Sounds)
    return replace(made, extractor=_WithTexts(made.extractor, tokenized(processor, candidates, max_length)))


class _WithTexts:
    """A feature extractor whose answers also hold texts."""

    def __init__(self, extractor: Any, tokens: Mapping[str, Any]) -> None:
        self.sampling_rate = extractor.sampling_rate
        self._extractor, self._tokens = extractor, tokens

    def __call__(self, waves: Sequence[Wave], **options: Any) -> dict[str, Any]:
        return {**self._extractor(waves, **options), **self._tokens}


class SoundCandidates(Candidates):
    """The likeliest of the data's classes for a sound, by their names alone."""

    template = "This is a sound of {}."
    output = "logits_per_audio"

    def _beside(self, candidates: Sequence[str]) -> Encoded:
        return _beside(self.rows, self.processor, candidates, self.max_length)


class ZeroShotAudioClassification(Task):
    """Audio classification with labels that are named at call time."""

    model = ORTModelForZeroShotAudioClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return sound_text_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return _beside(rows, processor, candidate_texts(rows), max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return SoundCandidates
