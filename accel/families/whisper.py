"""Family of Whisper, which processes long recordings in windows of a fixed length and can return timestamps."""

from __future__ import annotations

from ..interfaces.family import Family


class Whisper(Family):
    """Family of Whisper."""

    long_recordings = True


FAMILY = Whisper()
