"""Sample inputs for models that compare each audio with each text, such as CLAP. The number of audio inputs and texts may differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import ExportError
from ..interfaces.family import Sample
from ..interfaces.tracing_wrapper import unwrapped
from .image_text_samples import sample_texts
from .samples import SAMPLE_BATCH, processor_settings

_TEXTS = 3


def sound_text_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Make two audio inputs and three texts: `input_features: (batch, channels, frames, bins)` and `input_ids: (texts, sequence)`.

    The number of frames is fixed, because the feature extractor pads or cuts all audio to the same length.

    Raises:
        ExportError: The config has no spectrogram size, or the model computes long and short audio differently (fusion).
    """
    inner: Any = unwrapped(module)
    audio: Any = getattr(module.config, "audio_config", None)
    bins, size = getattr(audio, "num_mel_bins", None), getattr(audio, "spec_size", None)
    if bins is None or size is None:
        raise ExportError(
            f"accel cannot make sample audio for a {type(inner).__name__}, because audio_config in its config has no num_mel_bins or "
            "no spec_size.",
            fix="pass sample={input name: tensor} and axes={input name: {0: 'batch'}}.",
        )
    if getattr(audio, "enable_fusion", False):
        raise ExportError(
            f"This {type(inner).__name__} cannot be exported, because its config has enable_fusion=true. With fusion, the model computes "
            "long and short audio differently, and a graph computes all rows of a batch in the same way.",
            fix="run the model with backend='pytorch', or use a checkpoint with enable_fusion=false.",
        )
    texts, axes, unused = sample_texts(module, folder, _TEXTS, "texts")
    settings = processor_settings(folder, "feature_extractor")
    # The number of frames is the window of the feature extractor. Without a feature extractor, it is the size of the largest spectrogram
    # that the model does not resize.
    window = settings.get("nb_max_samples") or (settings.get("max_length_s") or 0) * (
        settings.get("sampling_rate") or 0
    )
    hop = settings.get("hop_length")
    frames = int(window) // int(hop) + 1 if window and hop else int(size) * (int(size) // int(bins))
    channels = 4 if settings.get("truncation") == "fusion" else 1
    sounds = torch.randn((SAMPLE_BATCH, channels, frames, int(bins)))
    sample = {**texts, "input_features": sounds}
    return sample, {**axes, "input_features": {0: "batch"}}, (*unused, "is_longer")
