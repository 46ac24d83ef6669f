"""Whisper: windows of one length, long recordings and timestamps."""

from __future__ import annotations

from ..interfaces.family import Family


class Whisper(Family):
    """Whisper."""

    long_recordings = True


FAMILY = Whisper()
