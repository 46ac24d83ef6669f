"""Task `document-question-answering`: answers from the words of a page and their bounding boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import progress
from ..capture.document_samples import document_sample
from ..data.encoded_rows import EncodedRows, from_tokenizer
from ..data.labels import accepted_answers, texts
from ..data.rows import DatasetRows
from ..errors import InputError
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.metrics import Floats, Values, edits, metric_of_sums, ratio
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.base import ORTModel


class ORTModelForDocumentQuestionAnswering(ORTModel):
    """Model that extracts answers from documents: `start_logits` and `end_logits`, each `(batch, sequence)`."""

    task = "document-question-answering"

    def forward(
        self, input_ids: Any = None, bbox: Any = None, attention_mask: Any = None, image: Any = None, **inputs: Any
    ) -> Any:
        """Run the graph.

        Args:
            input_ids: Token ids of the question and the document's words, `(batch, sequence)`.
            bbox: Bounding box of each token's word, `(batch, sequence, 4)`: left, top, right and bottom, from 0 to 1000.
            attention_mask: Attention mask, `(batch, sequence)`; all ones when `None`.
            image: Image from transformers' pipeline; used only if the graph has an input `image`. LayoutLM and LayoutLMv3 have none.
            **inputs: Further inputs of the graph.

        Raises:
            InputError: A bounding box ends before it begins, or is outside the page.
        """
        if "image" in self._input_names:
            inputs["image"] = image
        return self._run({"input_ids": input_ids, "bbox": bbox, "attention_mask": attention_mask, **inputs})


BOX = "bbox"
_LARGEST = 1000
_SEPARATOR = [_LARGEST] * 4
_NOWHERE = [0] * 4
_LEAST = 0.5  # similarities below this value count as 0


def _encode_documents(rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:
    """Tokenize each question together with the words of its document; the document is truncated if both are too long.

    Raises:
        InputError: Bounding boxes are missing or invalid, or the tokenizer has no `word_ids`.
    """
    if not getattr(processor, "is_fast", False):
        raise InputError(
            f"The tokenizer {type(processor).__name__} is not a fast tokenizer, and only fast tokenizers can assign tokens to the words of "
            "a document.",
            fix="load the tokenizer with AutoTokenizer.from_pretrained, which returns a fast tokenizer if the model has one.",
        )
    limit = max_length or min(processor.model_max_length, 512)
    cut = {"truncation": "only_second", "max_length": limit, "return_token_type_ids": True}
    questions, words = texts(rows, "question"), rows.column("words")
    boxes = [_boxes_of(value, len(words[i]), i) for i, value in enumerate(rows.column("boxes"))]
    if BOX in processor.model_input_names:
        # The tokenizers of LayoutLMv2 and LayoutLMv3 have an argument for the bounding boxes of words and return the boxes of tokens.
        encoding = processor(questions, words, boxes=boxes, **cut)
        return replace(from_tokenizer(encoding, processor), padding={**_padding(processor), BOX: 0})
    encoding = processor([text.split() for text in questions], words, is_split_into_words=True, **cut)
    token_boxes = [
        _boxes_of_tokens(encoding["input_ids"][i], encoding.sequence_ids(i), encoding.word_ids(i), boxes[i], processor)
        for i in range(len(questions))
    ]
    encoded = from_tokenizer(encoding, processor)
    return replace(encoded, tokens={**encoded.tokens, BOX: token_boxes}, padding={**encoded.padding, BOX: 0})


def _padding(processor: Any) -> dict[str, int]:
    return {"input_ids": processor.pad_token_id, "token_type_ids": processor.pad_token_type_id}


def _boxes_of_tokens(
    ids: Sequence[int],
    sequences: Sequence[int | None],
    words: Sequence[int | None],
    boxes: Sequence[Sequence[int]],
    tokenizer: Any,
) -> list[list[int]]:
    """Return the bounding box of each token, as in transformers' pipeline for LayoutLM.

    The box of a document token is the box of its word. All four coordinates of a separator token are 1000, and the coordinates of other
    tokens are 0.
    """
    return [
        list(boxes[word])
        if sequence == 1 and word is not None
        else _SEPARATOR
        if token == tokenizer.sep_token_id
        else _NOWHERE
        for token, sequence, word in zip(ids, sequences, words, strict=True)
    ]


def _boxes_of(value: Any, count: int, row: int) -> list[list[int]]:
    """Return the bounding boxes of a row's words, `[left, top, right, bottom]` from 0 to 1000, after checking them.

    Raises:
        InputError: A box is invalid, or the number of boxes differs from the number of words.
    """
    boxes = [[int(side) for side in box] for box in value]
    wrong = next(
        (b for b in boxes if len(b) != 4 or not 0 <= b[0] <= b[2] <= _LARGEST or not 0 <= b[1] <= b[3] <= _LARGEST),
        None,
    )
    if wrong is not None or len(boxes) != count:
        raise InputError(
            f"Row {row} of the data contains the invalid bounding box {wrong}."
            if wrong is not None
            else f"Row {row} of the data has {count} words, but {len(boxes)} bounding boxes.",
            fix="give each word one box [left, top, right, bottom]: integers from 0 to 1000, where 1000 is the page's width or height.",
        )
    return boxes


def _alike(predictions: Values, references: Values) -> Floats:
    rows = [
        (max(_score(predicted, accepted) for accepted in true), 1)
        for predicted, true in zip(predictions, references, strict=True)
    ]
    return np.asarray(rows, np.float64)


def _score(predicted: str, true: str) -> float:
    a, b = (" ".join(text.lower().split()) for text in (predicted, true))
    longest = max(len(a), len(b))
    alike = 1 - edits(a, b) / longest if longest else 1.0
    return alike if alike >= _LEAST else 0.0


ANLS = metric_of_sums("anls", _alike, {"anls": ratio})
"""Average normalized Levenshtein similarity (ANLS) of a predicted answer and the closest accepted answer, averaged over questions.

From Biten et al. (2019), Scene Text Visual Question Answering: one minus the number of edits divided by the length of the longer text,
ignoring case; values below 0.5 count as 0.
"""


class DocumentAnswerPredictor(Predictor):
    """Predictor of the answers to questions about documents. transformers' pipeline splits long documents into windows."""

    kind = "document answers"
    offline_metrics = (ANLS,)

    def _references(self) -> list[Any]:
        answers = [accepted_answers(value, self.rows) for value in self.rows.column("answers")]
        if not all(answers):
            raise InputError(
                f"Row {[bool(accepted) for accepted in answers].index(False)} of {self.rows.sample.source} has no answer, so its "
                "prediction cannot be measured.",
                fix="remove all rows without an answer from the data.",
            )
        return answers

    def _encode(self) -> EncodedRows:
        words = self.rows.column("words")
        self._documents = [
            list(zip(words[i], _boxes_of(value, len(words[i]), i), strict=True))
            for i, value in enumerate(self.rows.column("boxes"))
        ]
        # This method encodes no inputs, because `predict` calls transformers' pipeline, which encodes questions and documents.
        return EncodedRows()

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return the answers as texts."""
        from ..models.pipelines.pipeline import pipeline

        ask = pipeline("document-question-answering", model=model, tokenizer=self.processor)
        limit = {} if self.max_length is None else {"max_seq_len": self.max_length}
        questions = zip(texts(self.rows, "question"), self._documents, strict=True)
        predictions: list[Any] = []
        for question, words in progress.track(list(questions), what):
            answers = ask({"question": question, "word_boxes": words}, **limit)
            predictions.append(answers[0]["answer"] if answers else "")
        return predictions


class DocumentQuestionAnswering(Task):
    """The task `document-question-answering`: answers from the words of a page and their bounding boxes."""

    model = ORTModelForDocumentQuestionAnswering

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return document_sample(module, folder)

    def encode(self, rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:
        return _encode_documents(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return DocumentAnswerPredictor

    def tiny_batch(self, config: Any, rows: int, draw: torch.Generator, texts: Any) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = texts(rows)
        corners, sizes = (torch.randint(0, 500, (*batch["input_ids"].shape, 2), generator=draw) for _ in range(2))
        return {**batch, BOX: torch.cat([corners, corners + sizes], dim=-1)}
