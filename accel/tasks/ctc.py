"""Speech recognition by connectionist temporal classification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..capture.sound_samples import sound_sample
from ..data.batches import Encoded
from ..data.labels import texts
from ..data.rows import Rows
from ..data.sound_rows import encode_sounds
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.metrics import Floats, Metric, Values, edits, ratio
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.modality_models import SoundModel


class ORTModelForCTC(SoundModel):
    """Speech to text by frames (connectionist temporal classification): `logits: (batch, frames, vocab_size)`."""

    task = "ctc"


class Transcripts(Predictor):
    """The likeliest letters of a row, by its processor."""

    kind = "transcripts"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {name: _edit_rate(name) for name in ("wer", "cer")}

    def _longest(self, limit: int | None, asked: int | None) -> int | None:
        return None

    def _references(self) -> list[Any]:
        return texts(self.rows, "text")

    def predict(self, model: Model, what: str) -> list[Any]:
        """Texts."""
        return self._by_row(model, what, lambda logits, _: self.processor.batch_decode(logits.argmax(-1)))


def _edit_sums(split: Callable[[str], Sequence[str]]) -> Callable[[Values, Values], Floats]:
    def sums(predictions: Values, references: Values) -> Floats:
        pairs = [(split(found), split(true)) for found, true in zip(predictions, references, strict=True)]
        return np.asarray([(edits(found, true), len(true)) for found, true in pairs], np.float64)

    return sums


def _edit_rate(name: str) -> Metric:
    """Edits over the length of the references: the word error rate `wer`, and that of characters, `cer`."""
    sums = _edit_sums(str.split if name == "wer" else list)

    def compute(predictions: Values, references: Values) -> dict[str, float]:
        edits, length = sums(predictions, references).sum(0)
        return {name: float(edits / length) if length else float("nan"), "edits": float(edits), "length": float(length)}

    return Metric(name=name, key=name, compute=compute, sums=sums, finish=ratio, higher_is_better=False)


class Ctc(Task):
    """Speech recognition by connectionist temporal classification."""

    model = ORTModelForCTC

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return sound_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_sounds(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Transcripts
