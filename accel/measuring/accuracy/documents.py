"""What models find in documents, and how close it is to what was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import progress
from ...data.batches import Encoded
from ...data.documents import boxes_of
from ...data.labels import texts
from ...errors import InputError
from ...models.pipelines.pipeline import pipeline
from .metrics import Floats, Metric, Values, ratio
from .predictors import Model, Predictor, accepted_answers
from .rates import edits

_LEAST = 0.5  # of two texts that are less alike than this, nothing counts


class DocumentAnswers(Predictor):
    """A text out of each document, by the stock pipeline, which reads long documents in windows."""

    kind = "document answers"

    def _references(self) -> list[Any]:
        found = [accepted_answers(value, self.rows) for value in self.rows.column("answers")]
        if not all(found):
            raise InputError(
                f"Row {[bool(one) for one in found].index(False)} of {self.rows.sample.source} has no answer.",
                fix="leave such rows out.",
            )
        return found

    def _encode(self) -> Encoded:
        words = self.rows.column("words")
        self._documents = [
            list(zip(words[i], boxes_of(value, len(words[i]), i), strict=True))
            for i, value in enumerate(self.rows.column("boxes"))
        ]
        # The pipeline makes the inputs.
        return Encoded()

    def predict(self, model: Model, what: str) -> list[Any]:
        """Answers as texts."""
        ask = pipeline("document-question-answering", model=model, tokenizer=self.processor)
        limit = {} if self.max_length is None else {"max_seq_len": self.max_length}
        asked = zip(texts(self.rows, "question"), self._documents, strict=True)
        found: list[Any] = []
        for question, words in progress.track(list(asked), what):
            answers = ask({"question": question, "word_boxes": words}, **limit)
            found.append(answers[0]["answer"] if answers else "")
        return found


def answers_alike(name: str) -> Metric:
    """`anls`: how alike an answer and the closest of the accepted ones are, a mean over questions.

    Biten et al. (2019), Scene Text Visual Question Answering: one less the edits over the longer text's letters, case aside, and 0
    below a half.
    """

    def compute(predictions: Values, references: Values) -> dict[str, float]:
        return {name: float(ratio(_alike(predictions, references).sum(0)))}

    return Metric(name=name, key=name, compute=compute, sums=_alike, finish=ratio)


def _alike(predictions: Values, references: Values) -> Floats:
    rows = [(max(_score(found, one) for one in true), 1) for found, true in zip(predictions, references, strict=True)]
    return np.asarray(rows, np.float64)


def _score(found: str, true: str) -> float:
    a, b = (" ".join(text.lower().split()) for text in (found, true))
    longest = max(len(a), len(b))
    alike = 1 - edits(a, b) / longest if longest else 1.0
    return alike if alike >= _LEAST else 0.0
