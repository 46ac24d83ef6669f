"""Sample videos for a trace. The number of frames and the image size are fixed, because the model has positions only for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import ExportError
from ..interfaces.family import Sample
from ..interfaces.tracing_wrapper import unwrapped
from .samples import SAMPLE_BATCH, image_size

_FRAMES = ("num_frames", "frames_per_clip")
_NAMES = ("pixel_values", "pixel_values_videos")


def video_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Make two videos `(batch, frames, channels, height, width)`, under the name of the model's main input.

    Raises:
        ExportError: The model's main input is no video, or the config does not contain the number of frames.
    """
    inner = unwrapped(module)
    config: Any = module.config
    name = getattr(inner, "main_input_name", None)
    frames = next((n for field in _FRAMES if isinstance(n := getattr(config, field, None), int)), None)
    if name not in _NAMES or frames is None:
        raise ExportError(
            f"accel cannot make sample videos for a {type(inner).__name__}. The main input of the model is {name!r}, and the number of "
            f"frames in its config is {frames}.",
            fix="pass sample={input name: tensor} and axes={input name: {0: 'batch'}}.",
        )
    # In V-JEPA 2's config, the image size is named `crop_size`.
    cropped = getattr(config, "crop_size", None)
    height, width = (cropped, cropped) if isinstance(cropped, int) else image_size(config, folder)
    shape = (SAMPLE_BATCH, frames, getattr(config, "num_channels", None) or 3, height, width)
    return {name: torch.randn(shape)}, {name: {0: "batch"}}, ()
