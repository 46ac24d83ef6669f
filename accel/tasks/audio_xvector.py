"""Task `audio-xvector`: speaker embeddings of voices."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..capture.x_vectors import VoiceEmbedder
from ..data.labels import numbers
from ..errors import InputError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Metric, Values
from ..measuring.accuracy.predictors import CosinePredictor, Predictor
from ..models.modality_models import SoundModel


class ORTModelForAudioXVector(SoundModel):
    """Model that computes speaker embeddings: `embeddings: (batch, xvector_output_dim)` and `logits: (batch, speakers)`.

    A high cosine similarity of two embeddings means that both sounds probably have the same speaker.
    """

    task = "audio-xvector"


def _equal_error_rate(predictions: Values, references: Values) -> dict[str, float]:
    """Return the equal error rate, interpolated between the two nearest thresholds, and the area under the ROC curve."""
    from sklearn.metrics import roc_auc_score, roc_curve

    true = np.asarray(references, np.int64)
    if len(set(true.tolist())) < 2:
        return {"eer": float("nan"), "roc_auc": float("nan")}  # undefined if all pairs have the same label
    accepted, right, _ = roc_curve(true, np.asarray(predictions, np.float64), drop_intermediate=False)
    gap = (1 - right) - accepted
    last = int(np.flatnonzero(gap >= 0)[-1])
    after = min(last + 1, len(gap) - 1)
    share = gap[last] / (gap[last] - gap[after]) if gap[last] != gap[after] else 0.0
    rate = accepted[last] + share * (accepted[after] - accepted[last])
    return {"eer": float(rate), "roc_auc": float(roc_auc_score(true, np.asarray(predictions, np.float64)))}


_EER = Metric(name="eer", key="eer", compute=_equal_error_rate, higher_is_better=False)
"""Equal error rate: the error rate at the threshold where false rejections are as frequent as false acceptances."""


class SpeakerSimilarityPredictor(CosinePredictor):
    """Predictor of the cosine similarity of the embeddings of a row's two sounds.

    The reference is 1 if both sounds have the same speaker, and 0 if they have different speakers.
    """

    kind = "voices"
    offline_metrics = (_EER,)

    def _references(self) -> list[Any]:
        labels = numbers(self.rows, "label")
        if set(labels) - {0.0, 1.0}:
            raise InputError(
                f"The label column of {self.rows.sample.source} contains values other than 0 and 1, such as "
                f"{min(set(labels) - {0.0, 1.0}):g}.",
                fix="use the label 1 for two sounds of the same speaker, and 0 for two sounds of different speakers.",
            )
        return labels


class AudioXvector(Task):
    """The task `audio-xvector`: speaker embeddings of voices."""

    model = ORTModelForAudioXVector

    def traced(self, module: Any) -> Any:
        return VoiceEmbedder(module)

    def predictor(self, config: Any) -> type[Predictor]:
        return SpeakerSimilarityPredictor
