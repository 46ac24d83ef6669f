"""Video classification."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..capture.video_samples import video_sample
from ..data.batches import Encoded
from ..data.rows import Rows
from ..errors import InputError
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Classes, Predictor
from ..models.modality_models import ImageModel


class ORTModelForVideoClassification(ImageModel):
    """Videos to classes: `pixel_values: (batch, frames, channels, height, width)` to `logits: (batch, num_labels)`.

    V-JEPA 2 calls its frames `pixel_values_videos`.
    """

    task = "video-classification"

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """What it reads."""
        return ("video",)


_FIX = "decode the file, and give as many frames as the model reads: a list of pictures, or an array (frames, height, width, 3)."


class _Videos(Sequence[list[Any]]):
    """A column of videos, a list of frames each."""

    def __init__(self, rows: Rows) -> None:
        assert rows.sample.columns is not None
        self._column = rows.dataset[rows.sample.columns["video"]]

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: Any) -> Any:
        return _frames_of(self._column[index], index)


def _frames_of(value: Any, row: int) -> list[Any]:
    """The frames of a video: pictures, or arrays `(height, width, 3) uint8`.

    Raises:
        InputError: It has none, or frames in another form.
    """
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray) or not len(value):
        raise InputError(f"The video of row {row} is no list of frames but {value!r:.100}.", fix=_FIX)
    frames = [
        frame.convert("RGB") if hasattr(frame, "convert") else np.asarray(frame, dtype=np.uint8) for frame in value
    ]
    for frame in frames:
        shape = getattr(frame, "shape", None)
        if shape is not None and (len(shape) != 3 or shape[-1] != 3):
            raise InputError(f"A frame of row {row} has the shape {shape}; (height, width, 3) was expected.", fix=_FIX)
    return frames


class VideoClassification(Task):
    """Video classification."""

    model = ORTModelForVideoClassification

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return video_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return Encoded(images=(_Videos(rows), processor))

    def predictor(self, config: Any) -> type[Predictor]:
        return Classes
