"""Speech and other sounds from texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..capture.generation_graphs import family_parts
from ..interfaces.task import Task
from ..models.voices import ORTModelForTextToWaveform


class TextToAudio(Task):
    """Speech and other sounds from texts."""

    model = ORTModelForTextToWaveform

    def parts(self, source: Any, fusion: Any) -> Sequence[Any] | None:
        return family_parts(source)
