"""Speech recognition by encoder-decoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.speech_samples import speech_sample
from ..data.batches import Encoded
from ..data.rows import Rows
from ..data.sounds import encode_sounds
from ..interfaces.task import Sample, Task
from ..models.speech import ORTModelForSpeechSeq2Seq


class AutomaticSpeechRecognition(Task):
    """Speech recognition by encoder-decoders."""

    model = ORTModelForSpeechSeq2Seq

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return speech_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_sounds(rows, processor, max_length)
