"""Tiny video models with fixed seeds and processors, and test videos, created from configs like the models in `accel.testing.models`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from .models import LABELS, SIZES, check_family, rescale, small_config

FRAMES = 4
"""Number of frames in a video of the tiny models."""

_SIZE = 32
VIDEO_FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "videomae": ("VideoMAE", {"patch_size": 8}),
    "timesformer": ("Timesformer", {"patch_size": 8}),
    "vivit": ("Vivit", {"tubelet_size": [2, 8, 8]}),
}
"""Prefix of transformers' class names, and additional config fields, by family name."""


def tiny_video(height: int = 40, width: int = 60, frames: int = FRAMES, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return a video of coloured patches that move to the right: `(frames, height, width, 3) uint8`."""
    patches = np.random.default_rng(seed).integers(0, 255, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    picture = patches.repeat(8, 0).repeat(8, 1)[:height, :width]
    return np.stack([np.roll(picture, 4 * i, axis=1) for i in range(frames)])


def save_video_model(folder: Path, family: str = "videomae", seed: int = 0) -> Path:
    """Save a tiny model of a family of `VIDEO_FAMILIES` with its processor as a transformers folder."""
    check_family(family, VIDEO_FAMILIES)
    prefix, settings = VIDEO_FAMILIES[family]
    torch.manual_seed(seed)
    cls = getattr(transformers, f"{prefix}Config")
    config = small_config(cls, SIZES, image_size=_SIZE, num_frames=FRAMES, num_labels=LABELS, **settings)
    model: Any = rescale(getattr(transformers, f"{prefix}ForVideoClassification")(config), seed).eval()
    model.save_pretrained(folder)
    size = {"height": _SIZE, "width": _SIZE}
    transformers.VideoMAEImageProcessorPil(size={"shortest_edge": _SIZE}, crop_size=size).save_pretrained(folder)
    return folder
