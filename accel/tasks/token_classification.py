"""Token classification: a tag for each word."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ..data.batches import Encoded, cut, from_tokenizer
from ..data.labels import IGNORED, label_ids
from ..data.rows import Rows
from ..deploying.triton.text_fronts import Tensor, TextFront
from ..errors import InputError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Metric, Values, divide
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.base import ORTModel
from ..models.modality_models import TextModel
from ..serving.operations import READS_TEXT, Operation

if TYPE_CHECKING:
    from ..serving.http.endpoints import Endpoint


class ORTModelForTokenClassification(TextModel):
    """Named entities and the like: `logits: (batch, sequence, num_labels)`."""

    task = "token-classification"


class Tags(Predictor):
    """A tag for each labelled word; a word's first token stands for it."""

    kind = "tags"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {"seqeval": _SEQEVAL, "accuracy": _ACCURACY}

    def _references(self) -> list[Any]:
        names = {int(i): str(name) for i, name in self.config.id2label.items()}
        return [
            [names.get(i) if i != IGNORED else None for i in row] for row in label_ids(self.rows, "tags", self.config)
        ]

    def _encode(self) -> Encoded:
        encoded = super()._encode()
        assert encoded.words is not None
        self._kept = [self._words(i, words) for i, words in enumerate(encoded.words)]
        self.references = [
            [tags[word] for word, _ in kept] for tags, kept in zip(self.references, self._kept, strict=True)
        ]
        return encoded

    def _words(self, row: int, words: Sequence[int | None]) -> list[tuple[int, int]]:
        """Labelled words of a row and the token that stands for each: its first one."""
        tags = self.references[row]
        first: dict[int, int] = {}
        for position, word in enumerate(words):
            if word is not None:
                first.setdefault(word, position)
        if first and max(first) >= len(tags):
            raise InputError(
                f"Row {row} has {max(first) + 1} words and {len(tags)} tags.", fix="give one tag for each word."
            )
        return [(word, position) for word, position in first.items() if tags[word] is not None]

    def predict(self, model: Model, what: str) -> list[Any]:
        """Lists of tag names."""
        return self._by_row(model, what, self._tags)

    def _tags(self, logits: torch.Tensor, part: Sequence[int]) -> list[list[str]]:
        best = logits.argmax(-1)
        words = self.encoded.words
        assert words is not None
        offset = [best.shape[1] - len(words[i]) if self.encoded.left else 0 for i in part]
        return [
            [str(self.config.id2label[int(best[place, offset[place] + position])]) for _, position in self._kept[i]]
            for place, i in enumerate(part)
        ]

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Share of words."""
        return super().agreement([tag for row in first for tag in row], [tag for row in second for tag in row])


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Spans `(type, first, last)` in tags of the IOB1, IOB2, IOE and IOBES schemes, as conlleval and seqeval read them.

    A tag without a prefix counts as `I-`.
    """
    found: set[tuple[str, int, int]] = set()
    start, kind, before = 0, "", "O"
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-") if tag[:2] in ("B-", "I-", "E-", "S-") else ("I", "", tag)
        if tag == "O":
            prefix, name = "O", ""
        continues = before in ("B", "I") and prefix in ("I", "E") and name == kind
        if not continues:
            if before != "O":
                found.add((kind, start, position - 1))
            start, kind = position, name
        before = prefix
    return found


def _span_sums(predictions: Values, references: Values) -> Floats:
    rows = []
    for found, true in zip(predictions, references, strict=True):
        a, b = entities(found), entities(true)
        hits = sum(x == y for x, y in zip(found, true, strict=True))
        rows.append((len(a & b), len(a), len(b), hits, len(true)))
    return np.asarray(rows, np.float64)


def _seqeval(predictions: Values, references: Values) -> dict[str, float]:
    hits, predicted, true, right, tokens = _span_sums(predictions, references).sum(0)
    return {
        "overall_precision": float(hits / predicted) if predicted else 0.0,
        "overall_recall": float(hits / true) if true else 0.0,
        "overall_f1": float(2 * hits / (predicted + true)) if predicted + true else 0.0,
        "overall_accuracy": float(right / tokens) if tokens else 0.0,
    }


def _span_f1(sums: Floats) -> Floats:
    return divide(2 * sums[..., 0], sums[..., 1] + sums[..., 2])


def _token_accuracy(predictions: Values, references: Values) -> dict[str, float]:
    return {"accuracy": _seqeval(predictions, references)["overall_accuracy"]}


def _token_share(sums: Floats) -> Floats:
    return divide(sums[..., 3], sums[..., 4])


_SEQEVAL = Metric(name="seqeval", key="overall_f1", compute=_seqeval, sums=_span_sums, finish=_span_f1)
_ACCURACY = Metric(name="accuracy", key="accuracy", compute=_token_accuracy, sums=_span_sums, finish=_token_share)


class TokenClassification(Task):
    """Token classification: a tag for each word."""

    model = ORTModelForTokenClassification

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        if not getattr(processor, "is_fast", False):
            raise InputError("Words need a fast tokenizer to be found again.", fix="load it with AutoTokenizer.")
        found = processor(rows.column("words"), is_split_into_words=True, **cut(max_length))
        words = [found.word_ids(i) for i in range(len(found["input_ids"]))]
        return replace(from_tokenizer(found, processor), words=words)

    def predictor(self, config: Any) -> type[Predictor]:
        return Tags

    def operations(self) -> Sequence[Operation]:
        return (FindEntities(),)

    def fronts(self) -> Mapping[str, TextFront]:
        return {"token-classification": TAGS}


class FindEntities(Operation):
    """Named entities and the like."""

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
        return {"entities": [{**one, "entity": one.get("entity_group", one.get("entity"))} for one in answer]}

    def tensor_outputs(self, model: ORTModel) -> Mapping[str, tuple[str, int]]:
        return {"ENTITIES": ("BYTES", 1)}

    def tensor_values(self, answer: Any, model: ORTModel) -> Mapping[str, Any]:
        text = json.dumps(answer, ensure_ascii=False, allow_nan=False, default=lambda one: one.tolist())
        return {"ENTITIES": [text]}

    def endpoint(self) -> Endpoint:
        from ..serving.http.endpoints import Endpoint
        from ..serving.http.text_bodies import Texts, pipeline_answer

        class NerBody(Texts):
            """What `/ner` takes."""

            aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "simple"
            ignore_labels: list[str] | None = None

        return Endpoint(
            path="/ner",
            answer=pipeline_answer(self.name, "aggregation_strategy", "ignore_labels"),
            body=NerBody,
            summary="Named entities and the like",
            tag="tasks",
            operation=self.name,
            example={"inputs": "My name is Wolfgang and I live in Berlin."},
        )


TAGS = TextFront(
    module="tags",
    inputs=(Tensor(name="TEXT", dtype="string"),),
    outputs=lambda _: (Tensor(name="ENTITIES", dtype="string"),),
    options=lambda facts: {"labels": facts.labels, "unknown": facts.tokenizer.unk_token_id},
    sample={"TEXT": ["Wolfgang lives in Berlin."]},
    one_row=True,
)
