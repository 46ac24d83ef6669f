"""Task `ctc`: speech recognition with connectionist temporal classification (CTC)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..data.labels import texts
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Metric, Values, edits, ratio
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.modality_models import SoundModel
from ..serving.operations import Operation
from .automatic_speech_recognition import TranscriptionOperation


class ORTModelForCTC(SoundModel):
    """Speech recognition model with a CTC head (connectionist temporal classification): `logits: (batch, frames, vocab_size)`."""

    task = "ctc"


def _edit_sums(split: Callable[[str], Sequence[str]]) -> Callable[[Values, Values], Floats]:
    def sums(predictions: Values, references: Values) -> Floats:
        pairs = [(split(predicted), split(true)) for predicted, true in zip(predictions, references, strict=True)]
        return np.asarray([(edits(predicted, true), len(true)) for predicted, true in pairs], np.float64)

    return sums


def _edit_rate(name: str) -> Metric:
    """Return the metric `wer` (word error rate) or `cer` (character error rate): number of edits divided by the reference's length."""
    sums = _edit_sums(str.split if name == "wer" else list)

    def compute(predictions: Values, references: Values) -> dict[str, float]:
        edits, length = sums(predictions, references).sum(0)
        return {name: float(edits / length) if length else float("nan"), "edits": float(edits), "length": float(length)}

    return Metric(name=name, key=name, compute=compute, sums=sums, finish=ratio, higher_is_better=False)


class TranscriptPredictor(Predictor):
    """Predictor of transcripts: the processor decodes the most likely token of each frame."""

    kind = "transcripts"
    offline_metrics = (_edit_rate("wer"), _edit_rate("cer"))

    def _longest(self, limit: int | None, max_length: int | None) -> int | None:
        return None

    def _references(self) -> list[Any]:
        return texts(self.rows, "text")

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return the transcripts as texts."""
        return self._by_row(model, what, lambda logits, _: self.processor.batch_decode(logits.argmax(-1)))


class Ctc(Task):
    """The task `ctc`: speech recognition with connectionist temporal classification."""

    model = ORTModelForCTC

    def predictor(self, config: Any) -> type[Predictor]:
        return TranscriptPredictor

    def operations(self) -> Sequence[Operation]:
        return (TranscriptionOperation(),)
