"""Extractive question answering: a part of a context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data.batches import Encoded, encode_questions
from ..data.rows import Rows
from ..interfaces.task import Task
from ..measuring.accuracy.predictors import Answers, Predictor
from ..models.modality_models import TextModel


class ORTModelForQuestionAnswering(TextModel):
    """Extractive question answering: `start_logits` and `end_logits: (batch, sequence)`."""

    task = "question-answering"


class QuestionAnswering(Task):
    """Extractive question answering: a part of a context."""

    model = ORTModelForQuestionAnswering

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_questions(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return Answers

    def pipeline(self, name: str) -> type[Any]:
        from ..models.pipelines.question_answering import QuestionAnsweringPipeline

        return QuestionAnsweringPipeline

    def fronts(self) -> Mapping[str, Any]:
        from ..deploying.triton.text_fronts import ANSWERS

        return {"question-answering": ANSWERS}
