"""Speech and other sounds from texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..capture.waveform_samples import waveform_parts, waveform_sample
from ..interfaces.task import Sample, Task
from ..models.voices import ORTModelForTextToWaveform


class TextToAudio(Task):
    """Speech and other sounds from texts."""

    model = ORTModelForTextToWaveform

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return waveform_sample(module, folder)

    def parts(self, source: Any, fusion: Any) -> Sequence[Any] | None:
        return waveform_parts(source)
