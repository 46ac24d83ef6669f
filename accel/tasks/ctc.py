"""Speech recognition by connectionist temporal classification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.sound_samples import sound_sample
from ..data.batches import Encoded
from ..data.rows import Rows
from ..data.sounds import encode_sounds
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.predictors import Predictor
from ..measuring.accuracy.sounds import Transcripts
from ..models.modality_models import SoundModel


class ORTModelForCTC(SoundModel):
    """Speech to text by frames (connectionist temporal classification): `logits: (batch, frames, vocab_size)`."""

    task = "ctc"


class Ctc(Task):
    """Speech recognition by connectionist temporal classification."""

    model = ORTModelForCTC

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return sound_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_sounds(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Transcripts
