"""Question answering over the words of a page and their boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import progress
from ..capture.document_samples import document_sample
from ..data.batches import Encoded, from_tokenizer
from ..data.labels import accepted_answers, texts
from ..data.rows import Rows
from ..errors import InputError
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.metrics import Floats, Metric, Values, edits, ratio
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.base import ORTModel


class ORTModelForDocumentQuestionAnswering(ORTModel):
    """Answers out of documents: `start_logits` and `end_logits`, `(batch, sequence)` each."""

    task = "document-question-answering"

    def forward(
        self, input_ids: Any = None, bbox: Any = None, attention_mask: Any = None, image: Any = None, **inputs: Any
    ) -> Any:
        """Run the graph.

        Args:
            input_ids: `(batch, sequence)`: the question and the document's words.
            bbox: `(batch, sequence, 4)`: left, top, right and bottom of each token's word, from 0 to 1000.
            attention_mask: `(batch, sequence)`; ones when `None`.
            image: The stock pipeline's, which LayoutLM and LayoutLMv3 in transformers pass over as well.
            **inputs: The graph's others.

        Raises:
            InputError: Boxes that end before they begin, or leave the page.
        """
        if "image" in self._input_names:
            inputs["image"] = image
        return self._run({"input_ids": input_ids, "bbox": bbox, "attention_mask": attention_mask, **inputs})


BOX = "bbox"
_LARGEST = 1000
_SEPARATOR = [_LARGEST] * 4
_NOWHERE = [0] * 4
_LEAST = 0.5  # of two texts that are less alike than this, nothing counts


def _encode_documents(rows: Rows, processor: Any, max_length: int | None) -> Encoded:
    """Questions with the words of their documents, which are cut where both are too long.

    Raises:
        InputError: Words without boxes, boxes in another form, or a tokenizer that does not say which word a token is of.
    """
    if not getattr(processor, "is_fast", False):
        raise InputError("Words need a fast tokenizer to be found again.", fix="load it with AutoTokenizer.")
    limit = max_length or min(processor.model_max_length, 512)
    cut = {"truncation": "only_second", "max_length": limit, "return_token_type_ids": True}
    questions, words = texts(rows, "question"), rows.column("words")
    boxes = [_boxes_of(value, len(words[i]), i) for i, value in enumerate(rows.column("boxes"))]
    if BOX in processor.model_input_names:
        # LayoutLMv2's and 3's tokenizers read boxes themselves.
        found = processor(questions, words, boxes=boxes, **cut)
        return replace(from_tokenizer(found, processor), padding={**_padding(processor), BOX: 0})
    found = processor([text.split() for text in questions], words, is_split_into_words=True, **cut)
    places = [
        _boxes_of_tokens(found["input_ids"][i], found.sequence_ids(i), found.word_ids(i), boxes[i], processor)
        for i in range(len(questions))
    ]
    encoded = from_tokenizer(found, processor)
    return replace(encoded, tokens={**encoded.tokens, BOX: places}, padding={**encoded.padding, BOX: 0})


def _padding(processor: Any) -> dict[str, int]:
    return {"input_ids": processor.pad_token_id, "token_type_ids": processor.pad_token_type_id}


def _boxes_of_tokens(
    ids: Sequence[int],
    sequences: Sequence[int | None],
    words: Sequence[int | None],
    boxes: Sequence[Sequence[int]],
    tokenizer: Any,
) -> list[list[int]]:
    """A box a token, as transformers' pipeline gives LayoutLM: those of the words, and the page's far corner for separators."""
    return [
        list(boxes[word])
        if sequence == 1 and word is not None
        else _SEPARATOR
        if token == tokenizer.sep_token_id
        else _NOWHERE
        for token, sequence, word in zip(ids, sequences, words, strict=True)
    ]


def _boxes_of(value: Any, count: int, row: int) -> list[list[int]]:
    """The boxes of a row's words: `[left, top, right, bottom]`, from 0 to 1000.

    Raises:
        InputError: Another form or number.
    """
    found = [[int(side) for side in box] for box in value]
    wrong = next(
        (b for b in found if len(b) != 4 or not 0 <= b[0] <= b[2] <= _LARGEST or not 0 <= b[1] <= b[3] <= _LARGEST),
        None,
    )
    if wrong is not None or len(found) != count:
        raise InputError(
            f"Row {row} has {count} words and {len(found)} boxes{f', one of them {wrong}' if wrong is not None else ''}.",
            fix="give each word [left, top, right, bottom] in thousandths of the page's width and height.",
        )
    return found


class DocumentAnswers(Predictor):
    """A text out of each document, by the stock pipeline, which reads long documents in windows."""

    kind = "document answers"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {"anls": ANLS}

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
            list(zip(words[i], _boxes_of(value, len(words[i]), i), strict=True))
            for i, value in enumerate(self.rows.column("boxes"))
        ]
        # The pipeline makes the inputs.
        return Encoded()

    def predict(self, model: Model, what: str) -> list[Any]:
        """Answers as texts."""
        from ..models.pipelines.pipeline import pipeline

        ask = pipeline("document-question-answering", model=model, tokenizer=self.processor)
        limit = {} if self.max_length is None else {"max_seq_len": self.max_length}
        asked = zip(texts(self.rows, "question"), self._documents, strict=True)
        found: list[Any] = []
        for question, words in progress.track(list(asked), what):
            answers = ask({"question": question, "word_boxes": words}, **limit)
            found.append(answers[0]["answer"] if answers else "")
        return found


def _alike(predictions: Values, references: Values) -> Floats:
    rows = [(max(_score(found, one) for one in true), 1) for found, true in zip(predictions, references, strict=True)]
    return np.asarray(rows, np.float64)


def _score(found: str, true: str) -> float:
    a, b = (" ".join(text.lower().split()) for text in (found, true))
    longest = max(len(a), len(b))
    alike = 1 - edits(a, b) / longest if longest else 1.0
    return alike if alike >= _LEAST else 0.0


def _anls(predictions: Values, references: Values) -> dict[str, float]:
    return {"anls": float(ratio(_alike(predictions, references).sum(0)))}


ANLS = Metric(name="anls", key="anls", compute=_anls, sums=_alike, finish=ratio)
"""How alike an answer and the closest of the accepted ones are, a mean over questions.

Biten et al. (2019), Scene Text Visual Question Answering: one less the edits over the longer text's letters, case aside, and 0 below a
half.
"""


class DocumentQuestionAnswering(Task):
    """Question answering over the words of a page and their boxes."""

    model = ORTModelForDocumentQuestionAnswering

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return document_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return _encode_documents(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return DocumentAnswers
