"""Models of one graph that read sounds: waveforms as `input_values: (batch, samples)`, spectrograms as `input_features`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..capture.sound_samples import samples_for
from ..errors import InputError
from .base import ORTModel


class _SoundEncoder(ORTModel):
    """What they share: the signature that pipelines read.

    Without `attention_mask: (batch, samples)` or `(batch, frames)` no row is padded, as in transformers.
    """

    def _open(self) -> None:
        super()._open()
        self._least = samples_for(1, self.config) or 0

    def forward(
        self, input_values: Any = None, attention_mask: Any = None, input_features: Any = None, **inputs: Any
    ) -> Any:
        """Run the graph on whichever of the two it takes; the first argument is either, by position.

        Raises:
            InputError: Inputs that are no sounds, or waveforms of fewer samples than the model's convolutions read.
        """
        sounds = input_values if input_features is None else input_features
        shape = sounds.shape if hasattr(sounds, "shape") else ()
        if shape and shape[-1] < max(self._least, 1):
            raise InputError(
                f"A sound of {shape[-1]} samples came; the model reads at least {max(self._least, 1)}.",
                fix="leave it out, or pad with zeros: "
                f"feature_extractor(..., padding='max_length', max_length={max(self._least, 1)}).",
            )
        given = {self.main_input_name: sounds, "attention_mask": attention_mask, **inputs}
        if input_values is not None and input_features is not None:
            given["input_values"] = input_values
        return self._run({name: value for name, value in given.items() if value is not None})


class ORTModelForCTC(_SoundEncoder):
    """Speech to text by frames (connectionist temporal classification): `logits: (batch, frames, vocab_size)`."""

    task = "ctc"


class ORTModelForAudioClassification(_SoundEncoder):
    """Sounds to classes: `logits: (batch, num_labels)`."""

    task = "audio-classification"


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

    def forward(self, input_ids: Any = None, input_features: Any = None, **inputs: Any) -> Any:
        """Run the graph on `input_ids: (texts, sequence)` and `input_features: (batch, channels, frames, bins)`."""
        return self._run({"input_ids": input_ids, "input_features": input_features, **inputs})

    def _choose_output(self, names: Sequence[str]) -> Any:
        super()._choose_output(names)
        return AudioTextOutput


class ORTModelForAudioFrameClassification(_SoundEncoder):
    """A class for each frame, such as who speaks: `logits: (batch, frames, num_labels)`."""

    task = "audio-frame-classification"


class ORTModelForAudioXVector(_SoundEncoder):
    """Voices: `embeddings: (batch, xvector_output_dim)` to compare by their cosine, and `logits: (batch, speakers)`."""

    task = "audio-xvector"
