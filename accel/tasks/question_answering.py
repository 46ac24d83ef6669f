"""Extractive question answering: a part of a context."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import progress
from ..data.batches import Encoded, from_tokenizer
from ..data.labels import accepted_answers, texts
from ..data.rows import Rows
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Metric, Values, divide, ratio
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.modality_models import TextModel


class ORTModelForQuestionAnswering(TextModel):
    """Extractive question answering: `start_logits` and `end_logits: (batch, sequence)`."""

    task = "question-answering"


_LONGEST = 384  # tokens of a question with a part of its context


class Answers(Predictor):
    """A text out of each context, by the question-answering pipeline, which reads long contexts in windows."""

    kind = "answers"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {"squad": _SQUAD, "exact_match": _EXACT_MATCH}

    def _references(self) -> list[Any]:
        return [accepted_answers(value, self.rows) for value in self.rows.column("answers")]

    def predict(self, model: Model, what: str) -> list[Any]:
        """Answers as texts."""
        from ..models.pipelines.pipeline import pipeline

        pipe = pipeline("question-answering", model=model, tokenizer=self.processor)
        examples = [
            {"question": question, "context": context}
            for question, context in zip(texts(self.rows, "question"), texts(self.rows, "context"), strict=True)
        ]
        options: dict[str, Any] = {"handle_impossible_answer": any(not accepted for accepted in self.references)}
        if self.max_length is not None:
            options["max_seq_len"] = min(self.max_length, _LONGEST)
        found: list[Any] = []
        parts = [examples[i : i + self.batch_size] for i in range(0, len(examples), self.batch_size)]
        for part in progress.track(parts, what):
            found += [
                answer["answer"] if answer else "" for answer in pipe(part, batch_size=self.batch_size, **options)
            ]
        return found


def _normalized(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces (the official SQuAD 1.1 script)."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def _overlap(found: str, true: str) -> float:
    a, b = _normalized(found).split(), _normalized(true).split()
    if not a or not b:
        return float(a == b)
    same = sum((Counter(a) & Counter(b)).values())
    return 2 * same / (len(a) + len(b))


def _answer_sums(predictions: Values, references: Values) -> Floats:
    rows = []
    for found, accepted in zip(predictions, references, strict=True):
        accepted = accepted or [""]
        exact = any(_normalized(found) == _normalized(text) for text in accepted)
        rows.append((float(exact), 1.0, max(_overlap(found, text) for text in accepted)))
    return np.asarray(rows, np.float64)


def _squad(predictions: Values, references: Values) -> dict[str, float]:
    exact, rows, overlap = _answer_sums(predictions, references).sum(0)
    return {"exact_match": float(100 * exact / rows), "f1": float(100 * overlap / rows)}


def _squad_f1(sums: Floats) -> Floats:
    return 100 * divide(sums[..., 2], sums[..., 1])


def _exact_match(predictions: Values, references: Values) -> dict[str, float]:
    return {"exact_match": _squad(predictions, references)["exact_match"] / 100}


_SQUAD = Metric(name="squad", key="f1", compute=_squad, sums=_answer_sums, finish=_squad_f1, points=1.0)
_EXACT_MATCH = Metric(
    name="exact_match", key="exact_match", compute=_exact_match, sums=_answer_sums, finish=ratio, rowwise=True,
)  # fmt: skip


class QuestionAnswering(Task):
    """Extractive question answering: a part of a context."""

    model = ORTModelForQuestionAnswering

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        limits = {"truncation": "only_second", "max_length": min(max_length or _LONGEST, _LONGEST)}
        return from_tokenizer(processor(texts(rows, "question"), texts(rows, "context"), **limits), processor)

    def predictor(self, config: Any) -> type[Predictor]:
        return Answers

    def pipeline(self, name: str) -> type[Any]:
        from ..models.pipelines.question_answering import QuestionAnsweringPipeline

        return QuestionAnsweringPipeline

    def fronts(self) -> Mapping[str, Any]:
        from ..deploying.triton.text_fronts import ANSWERS

        return {"question-answering": ANSWERS}
