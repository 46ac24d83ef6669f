"""Embeddings of voices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..capture.sound_samples import sound_sample
from ..capture.x_vectors import VoiceEmbedder
from ..data.batches import Encoded
from ..data.labels import numbers
from ..data.rows import Rows
from ..data.sound_rows import encode_sounds
from ..errors import InputError
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.metrics import Metric, Values
from ..measuring.accuracy.predictors import Cosines, Predictor
from ..models.modality_models import SoundModel


class ORTModelForAudioXVector(SoundModel):
    """Voices: `embeddings: (batch, xvector_output_dim)` to compare by their cosine, and `logits: (batch, speakers)`."""

    task = "audio-xvector"


class Voices(Cosines):
    """The cosine of the embeddings of a row's two voices; what is right is 1 for one speaker and 0 for two."""

    kind = "voices"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {"eer": _EER}

    def _references(self) -> list[Any]:
        found = numbers(self.rows, "label")
        if set(found) - {0.0, 1.0}:
            raise InputError(
                f"The labels of {self.rows.sample.source} are not 0 and 1 alone.",
                fix="give 1 for two sounds of one speaker, 0 for those of two.",
            )
        return found


def _equal_error_rate(predictions: Values, references: Values) -> dict[str, float]:
    """Where as many pairs of one speaker are refused as pairs of two are accepted, between the two thresholds around it."""
    from sklearn.metrics import roc_auc_score, roc_curve

    true = np.asarray(references, np.int64)
    if len(set(true.tolist())) < 2:
        return {"eer": float("nan"), "roc_auc": float("nan")}  # nothing to tell apart
    accepted, right, _ = roc_curve(true, np.asarray(predictions, np.float64), drop_intermediate=False)
    gap = (1 - right) - accepted
    last = int(np.flatnonzero(gap >= 0)[-1])
    after = min(last + 1, len(gap) - 1)
    share = gap[last] / (gap[last] - gap[after]) if gap[last] != gap[after] else 0.0
    rate = accepted[last] + share * (accepted[after] - accepted[last])
    return {"eer": float(rate), "roc_auc": float(roc_auc_score(true, np.asarray(predictions, np.float64)))}


_EER = Metric(name="eer", key="eer", compute=_equal_error_rate, higher_is_better=False)
"""The share of mistakes at the threshold that refuses as many of the same as it accepts of others."""


class AudioXvector(Task):
    """Embeddings of voices."""

    model = ORTModelForAudioXVector

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return sound_sample(module, folder)

    def traced(self, module: Any) -> Any:
        return VoiceEmbedder(module)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_sounds(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Voices
