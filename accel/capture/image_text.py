"""Inputs for models that hold images and texts side by side (CLIP): as many of each as there are, compared all with all."""

from __future__ import annotations

from pathlib import Path

import torch

from .samples import SAMPLE_SEQUENCE, Axes, image_sample, resize, text_config, text_inputs
from .wrapper import Tensors

SAMPLE_TEXTS = 3


def image_text_sample(module: torch.nn.Module, folder: Path | None) -> tuple[Tensors, Axes, tuple[str, ...]]:
    """Two images and three texts: `pixel_values: (batch, channels, height, width)` and `input_ids: (texts, sequence)`."""
    config = text_config(module.config)
    names, unused = text_inputs(module, config, folder)
    shape = (SAMPLE_TEXTS, SAMPLE_SEQUENCE)
    text_axes = {name: {0: "texts", 1: "sequence"} for name in names}
    texts = resize(
        {name: torch.ones(shape, dtype=torch.int64) for name in names},
        text_axes,
        {"texts": SAMPLE_TEXTS, "sequence": SAMPLE_SEQUENCE},
        config,
        seed=0,
    )
    images, axes = image_sample(module, folder, texts)
    return {**texts, **images}, {**text_axes, **axes}, unused
