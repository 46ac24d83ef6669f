"""Task `video-classification`: one class per video."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..data.encoded_rows import EncodedRows, LazyColumn
from ..data.image_rows import rgb
from ..data.rows import DatasetRows
from ..errors import InputError
from ..interfaces.task import Task
from ..measuring.accuracy.predictors import ClassPredictor, Predictor
from ..models.modality_models import ImageModel


class ORTModelForVideoClassification(ImageModel):
    """Model that classifies videos: `pixel_values: (batch, frames, channels, height, width)` to `logits: (batch, num_labels)`.

    For V-JEPA 2, the input is named `pixel_values_videos`.
    """

    task = "video-classification"

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """Modality of the input, `video`."""
        return ("video",)


_FIX = (
    "decode the video first, and pass its frames as a list of images or an array (frames, height, width, 3), with the number of frames "
    "that the model needs."
)


def _frames_of(value: Any, row: int, _: int) -> list[Any]:
    """Return the frames of a video: images, or arrays `(height, width, 3) uint8`.

    Raises:
        InputError: The video has no frames, or invalid frames.
    """
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray) or not len(value):
        raise InputError(f"The video of row {row} is {value!r:.100}, which is not a list of frames.", fix=_FIX)
    frames = [rgb(frame) if hasattr(frame, "convert") else np.asarray(frame, dtype=np.uint8) for frame in value]
    for frame in frames:
        shape = getattr(frame, "shape", None)
        if shape is not None and (len(shape) != 3 or shape[-1] != 3):
            raise InputError(
                f"A frame of the video in row {row} has the shape {shape}; the shape must be (height, width, 3).",
                fix=_FIX,
            )
    return frames


class VideoClassification(Task):
    """The task `video-classification`."""

    model = ORTModelForVideoClassification

    def encode(self, rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:
        return EncodedRows(media=(LazyColumn([rows.lazy_column("video")], _frames_of), processor))

    def predictor(self, config: Any) -> type[Predictor]:
        return ClassPredictor

    def tiny_batch(self, config: Any, rows: int, draw: torch.Generator, texts: Any) -> dict[str, torch.Tensor]:
        shape = (rows, config.num_frames, 3, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=draw)}
