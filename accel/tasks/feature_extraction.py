"""Hidden states, and embeddings of sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..interfaces.task import Task
from ..measuring.accuracy.predictors import Predictor, Similarities
from ..models.encoders import ORTModelForFeatureExtraction


class FeatureExtraction(Task):
    """Hidden states, and embeddings of sentences."""

    model = ORTModelForFeatureExtraction

    def predictor(self, config: Any) -> type[Predictor]:
        return Similarities

    def fronts(self) -> Mapping[str, Any]:
        from ..deploying.triton.text_fronts import EMBEDDINGS

        return {"feature-extraction": EMBEDDINGS, "sentence-similarity": EMBEDDINGS}
