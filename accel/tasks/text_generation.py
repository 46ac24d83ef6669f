"""Text generation by decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..interfaces.task import Task
from ..measuring.accuracy.predictors import NextTokens, Predictor
from ..models.generation_mixin import ORTModelForCausalLM


class TextGeneration(Task):
    """Text generation by decoders."""

    model = ORTModelForCausalLM

    def predictor(self, config: Any) -> type[Predictor]:
        return NextTokens

    def fronts(self) -> Mapping[str, Any]:
        from ..deploying.triton.text_fronts import GENERATION

        return {"text-generation": GENERATION}
