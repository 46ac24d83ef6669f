"""Whisper: a fixed window of audio, long recordings and timestamps."""

from __future__ import annotations

from ..interfaces.family import Family


class Whisper(Family):
    """Family of Whisper."""

    long_recordings = True


FAMILY = Whisper()
