"""Columns of videos as model inputs: their frames, as pictures or arrays, read when their batch is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InputError
from .batches import Encoded
from .rows import Rows

_FIX = "decode the file, and give as many frames as the model reads: a list of pictures, or an array (frames, height, width, 3)."


def encode_videos(rows: Rows, processor: Any, max_length: int | None) -> Encoded:  # noqa: ARG001
    """Videos, which are read when their batch is made."""
    return Encoded(images=(_Videos(rows), processor))


class _Videos(Sequence[list[Any]]):
    """A column of videos, a list of frames each."""

    def __init__(self, rows: Rows) -> None:
        assert rows.sample.columns is not None
        self._column = rows.dataset[rows.sample.columns["video"]]

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: Any) -> Any:
        return frames_of(self._column[index], index)


def frames_of(value: Any, row: int) -> list[Any]:
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
