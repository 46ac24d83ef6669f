"""Inputs for models that hold sounds and texts side by side (CLAP): as many of each as there are, compared all with all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..artifact.reading import read_json
from ..errors import ExportError
from ..interfaces.family import Sample
from ..interfaces.wrapper import unwrapped
from .image_text_samples import texts_beside
from .samples import SAMPLE_BATCH

_TEXTS = 3


def sound_text_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Two sounds and three texts: `input_features: (batch, channels, frames, bins)`, as many frames as the feature extractor makes of
    every sound, and `input_ids: (texts, sequence)`.

    Raises:
        ExportError: The model is none of this kind, or looks at long and short sounds in two ways.
    """
    inner: Any = unwrapped(module)
    audio: Any = getattr(module.config, "audio_config", None)
    bins, size = getattr(audio, "num_mel_bins", None), getattr(audio, "spec_size", None)
    if bins is None or size is None:
        raise ExportError(
            f"No sounds can be made for a {type(inner).__name__}: its config says no spectrogram's size.",
            fix="pass sample={name: tensor} and axes={name: {0: 'batch'}}.",
        )
    if getattr(audio, "enable_fusion", False):
        raise ExportError(
            f"This {type(inner).__name__} fuses features of those sounds alone that are longer than its window: which of a batch it "
            "computes depends on them, and a graph computes the same for all.",
            fix="run it with backend='pytorch', or take one without fusion (enable_fusion is false in its config).",
        )
    texts, axes, unused = texts_beside(module, folder, _TEXTS, "texts")
    settings: Mapping[str, Any] = {}
    if folder is not None:
        for name in ("preprocessor_config.json", "processor_config.json"):
            if (folder / name).is_file():
                found = read_json(folder / name)
                settings = found.get("feature_extractor") or found
                break
    # What the window of the extractor becomes; without one, what the model makes no larger.
    window = settings.get("nb_max_samples") or (settings.get("max_length_s") or 0) * (
        settings.get("sampling_rate") or 0
    )
    hop = settings.get("hop_length")
    frames = int(window) // int(hop) + 1 if window and hop else int(size) * (int(size) // int(bins))
    channels = 4 if settings.get("truncation") == "fusion" else 1
    sounds = torch.randn((SAMPLE_BATCH, channels, frames, int(bins)))
    sample = {**texts, "input_features": sounds}
    return sample, {**axes, "input_features": {0: "batch"}}, (*unused, "is_longer")
