"""Task `token-classification`: a tag for each word, such as named entities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ..data.encoded_rows import EncodedRows, cut, from_tokenizer
from ..data.labels import IGNORED, label_ids
from ..data.rows import DatasetRows
from ..deploying.triton.text_fronts import TextFront, TritonTensor
from ..errors import InputError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Values, divide, metric_of_sums
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.base import ORTModel
from ..models.modality_models import TextModel
from ..serving.operations import READS_TEXT, Operation

if TYPE_CHECKING:
    from ..serving.http.endpoints import Endpoint


class ORTModelForTokenClassification(TextModel):
    """Token classification model, for named entities and similar tags: `logits: (batch, sequence, num_labels)`."""

    task = "token-classification"


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return the entities `(type, first word, last word)` in a row of tags, with the rules of conlleval and seqeval.

    Tags can be in the scheme IOB1, IOB2, IOE or IOBES. A tag without a prefix counts as an `I-` tag.
    """
    spans: set[tuple[str, int, int]] = set()
    start, kind, before = 0, "", "O"
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-") if tag[:2] in ("B-", "I-", "E-", "S-") else ("I", "", tag)
        if tag == "O":
            prefix, name = "O", ""
        continues = before in ("B", "I") and prefix in ("I", "E") and name == kind
        if not continues:
            if before != "O":
                spans.add((kind, start, position - 1))
            start, kind = position, name
        before = prefix
    return spans


def _span_sums(predictions: Values, references: Values) -> Floats:
    rows = []
    for predicted, true in zip(predictions, references, strict=True):
        a, b = entities(predicted), entities(true)
        hits = sum(x == y for x, y in zip(predicted, true, strict=True))
        rows.append((len(a & b), len(a), len(b), hits, len(true)))
    return np.asarray(rows, np.float64)


_SEQEVAL = metric_of_sums(
    "seqeval",
    _span_sums,
    {
        "overall_precision": lambda sums: divide(sums[..., 0], sums[..., 1]),
        "overall_recall": lambda sums: divide(sums[..., 0], sums[..., 2]),
        "overall_f1": lambda sums: divide(2 * sums[..., 0], sums[..., 1] + sums[..., 2]),
        "overall_accuracy": lambda sums: divide(sums[..., 3], sums[..., 4]),
    },
    key="overall_f1",
)
_ACCURACY = metric_of_sums("accuracy", _span_sums, {"accuracy": lambda sums: divide(sums[..., 3], sums[..., 4])})


class TagPredictor(Predictor):
    """Predictor of a tag for each labelled word. The tag of a word is the prediction for the word's first token."""

    kind = "tags"
    offline_metrics = (_SEQEVAL, _ACCURACY)

    def _references(self) -> list[Any]:
        names = {int(i): str(name) for i, name in self.config.id2label.items()}
        return [
            [names.get(i) if i != IGNORED else None for i in row] for row in label_ids(self.rows, "tags", self.config)
        ]

    def _encode(self) -> EncodedRows:
        encoded = super()._encode()
        assert encoded.words is not None
        self._labelled = [self._words(i, words) for i, words in enumerate(encoded.words)]
        self.references = [
            [tags[word] for word, _ in labelled] for tags, labelled in zip(self.references, self._labelled, strict=True)
        ]
        return encoded

    def _words(self, row: int, words: Sequence[int | None]) -> list[tuple[int, int]]:
        """Return the labelled words of a row, each with the position of its first token."""
        tags = self.references[row]
        first: dict[int, int] = {}
        for position, word in enumerate(words):
            if word is not None:
                first.setdefault(word, position)
        if first and max(first) >= len(tags):
            raise InputError(
                f"Row {row} of the data has {max(first) + 1} words, but {len(tags)} tags.",
                fix="give each word exactly one tag.",
            )
        return [(word, position) for word, position in first.items() if tags[word] is not None]

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return the tag names of the labelled words, one list per row."""
        return self._by_row(model, what, self._tags)

    def _tags(self, logits: torch.Tensor, part: Sequence[int]) -> list[list[str]]:
        best = logits.argmax(-1)
        words = self.encoded.words
        assert words is not None
        offset = [best.shape[1] - len(words[i]) if self.encoded.left else 0 for i in part]
        return [
            [str(self.config.id2label[int(best[index, offset[index] + position])]) for _, position in self._labelled[i]]
            for index, i in enumerate(part)
        ]

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Return the fraction of words for which two models predict the same tag."""
        return super().agreement([tag for row in first for tag in row], [tag for row in second for tag in row])


class TokenClassification(Task):
    """The task `token-classification`: a tag for each word, such as named entities."""

    model = ORTModelForTokenClassification

    def encode(self, rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:
        if not getattr(processor, "is_fast", False):
            raise InputError(
                f"The tokenizer {type(processor).__name__} is not a fast tokenizer, and only fast tokenizers can assign tokens to words.",
                fix="load the tokenizer with AutoTokenizer.from_pretrained, which returns a fast tokenizer if the model has one.",
            )
        encoding = processor(rows.column("words"), is_split_into_words=True, **cut(max_length))
        words = [encoding.word_ids(i) for i in range(len(encoding["input_ids"]))]
        return replace(from_tokenizer(encoding, processor), words=words)

    def predictor(self, config: Any) -> type[Predictor]:
        return TagPredictor

    def operations(self) -> Sequence[Operation]:
        return (EntityOperation(),)

    def fronts(self) -> Mapping[str, TextFront]:
        return {"token-classification": TAGS}


class EntityOperation(Operation):
    """Operation that returns named entities and similar tags of a text."""

    name = "token-classification"
    reads = READS_TEXT

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        entity = {
            "entity": pa.string(),
            "score": pa.float64(),
            "word": pa.string(),
            "start": pa.int64(),
            "end": pa.int64(),
        }
        return {"entities": pa.list_(pa.struct(entity))}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"entities": [{**item, "entity": item.get("entity_group", item.get("entity"))} for item in answer]}

    def tensor_outputs(self, model: ORTModel) -> Mapping[str, tuple[str, int]]:
        return {"ENTITIES": ("BYTES", 1)}

    def tensor_values(self, answer: Any, model: ORTModel) -> Mapping[str, Any]:
        text = json.dumps(answer, ensure_ascii=False, allow_nan=False, default=lambda value: value.tolist())
        return {"ENTITIES": [text]}

    def endpoint(self) -> Endpoint:
        from ..serving.http.endpoints import Endpoint
        from ..serving.http.text_bodies import TextsBody, pipeline_answer

        class NerBody(TextsBody):
            """Body of `/ner`."""

            aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "simple"
            ignore_labels: list[str] | None = None

        return Endpoint(
            path="/ner",
            answer=pipeline_answer(self.name, "aggregation_strategy", "ignore_labels"),
            body=NerBody,
            summary="Return the named entities of a text",
            tag="tasks",
            operation=self.name,
            example={"inputs": "My name is Wolfgang and I live in Berlin."},
        )


TAGS = TextFront(
    service="tags:TokenClassifier",
    inputs=(TritonTensor(name="TEXT", dtype="string"),),
    outputs=lambda _: (TritonTensor(name="ENTITIES", dtype="string"),),
    options=lambda facts: {"labels": facts.labels, "unknown": facts.tokenizer.unk_token_id},
    sample={"TEXT": ["Wolfgang lives in Berlin."]},
    one_row=True,
)
