"""What a model answers to rows of a task, in the form that its metrics compare: classes, tags, answers, numbers, tokens.

A predictor turns rows into inputs and references once, and any number of models into predictions. `Task.predictor` names
the one of a task; a new kind of prediction is a class here and its metrics in `metrics.OFFERED`.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ... import capture, progress
from ...artifact.sentence_settings import SentenceSettings, sentence_settings
from ...data.batches import Encoded, encode, for_graph, from_tokenizer, longest
from ...data.labels import IGNORED, label_ids, numbers, texts
from ...data.rows import Rows
from ...errors import ConfigError, InputError, TaskError
from ...interfaces.task_registry import load_task, measured_tasks
from ...models.base import ORTModel
from ...models.texts import COUNTED, SentenceRows, SentenceVectors
from ...upstream.library_output import quiet
from .metrics import TokenScores

Model = ORTModel | torch.nn.Module
Batch = tuple[list[int], Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]

_WINDOW = 512
_TOKENS_A_CALL = 1024
_QUESTION_TOKENS = 384


class Predictor(abc.ABC):
    """Base of the predictors: rows as inputs and references.

    Args:
        rows: Labelled rows, their columns mapped.
        task: Of the models.
        config: Their transformers config, for labels.
        processor: Their tokenizer or image processor.
        max_length: Tokens that longer rows are cut to; the model's limit when `None`.
        limit: The models' positions.
        batch_size: Rows a call.
        folder: Holds their files, where there is one.
        by_length: Whether rows of like length share a call; otherwise they share one in their order.

    Attributes:
        kind: What predictions are; the metrics of `metrics.OFFERED` that fit.
        references: What is right, one a row.
        encoded: The rows as inputs.
        max_length: Tokens that longer rows were cut to.
        batch_size: Rows a call.
        by_length: As given.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        rows: Rows,
        *,
        task: str,
        config: Any,
        processor: Any,
        max_length: int | None,
        limit: int | None,
        batch_size: int,
        folder: Path | None = None,
        by_length: bool = True,
    ) -> None:
        self.rows = rows
        self.settings = sentence_settings(folder) if folder is not None else SentenceSettings(folder=Path())
        self.task = task
        self.config = config
        self.processor = processor
        self.max_length = self._longest(limit, max_length)
        self.batch_size = batch_size
        self.by_length = by_length
        self.references = self._references()
        self.encoded = self._encode()

    def _longest(self, limit: int | None, asked: int | None) -> int | None:
        return longest(limit, self.processor, asked)

    @abc.abstractmethod
    def _references(self) -> list[Any]:
        """What is right, one a row."""

    def _encode(self) -> Encoded:
        return encode(self.rows, self.task, self.processor, self.max_length)

    @abc.abstractmethod
    def predict(self, model: Model, what: str) -> list[Any]:
        """One prediction a row."""

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Share of rows (of tags and tokens: of them) with the same prediction; `None` where predictions are numbers."""
        return sum(bool(a == b) for a, b in zip(first, second, strict=True)) / len(first)

    def batches(self, model: Model, what: str, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """Row numbers, inputs and outputs of the model, batch by batch; of some rows, or of all."""
        plan = self.encoded.plan(self.batch_size, by_length=self.by_length)
        if rows is not None:
            wanted = set(rows)
            plan = [kept for part in plan if (kept := [i for i in part if i in wanted])]
        takes = _takes(model)
        with torch.inference_mode():
            for part in progress.track(plan, what):
                feeds = self.encoded.batch(part)
                if isinstance(model, ORTModel) and not model.can_generate():
                    component = model.artifact.components[0]
                    inputs: Mapping[str, torch.Tensor] = for_graph(feeds, component.inputs, component.own_defaults)
                else:
                    inputs = {name: value for name, value in feeds.items() if name in takes}
                yield part, feeds, model(**inputs)

    def _by_row(
        self, model: Model, what: str, values: Callable[[torch.Tensor, Sequence[int]], Sequence[Any]]
    ) -> list[Any]:
        """Predictions by `values` of the logits and the row numbers of each batch."""
        predictions: list[Any] = [None] * len(self.rows)
        for part, _, output in self.batches(model, what):
            for i, value in zip(part, values(output["logits"].float().cpu(), part), strict=True):
                predictions[i] = value
        return predictions


class Classes(Predictor):
    """The likeliest class of a row, as its number."""

    kind = "classes"

    def _references(self) -> list[Any]:
        return label_ids(self.rows, "label", self.config)

    def predict(self, model: Model, what: str) -> list[Any]:
        """Class numbers."""
        return self._by_row(model, what, lambda logits, _: logits.argmax(-1).tolist())


class Numbers(Predictor):
    """A number a row: regression."""

    kind = "numbers"

    def _references(self) -> list[Any]:
        return numbers(self.rows, "label")

    def predict(self, model: Model, what: str) -> list[Any]:
        """Numbers."""
        return self._by_row(model, what, lambda logits, part: logits.reshape(len(part), -1)[:, 0].tolist())

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Numbers are hardly ever the same."""
        return None


class Tags(Predictor):
    """A tag for each labelled word; a word's first token stands for it."""

    kind = "tags"

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


class Answers(Predictor):
    """A text out of each context, by the question-answering pipeline, which reads long contexts in windows."""

    kind = "answers"

    def _references(self) -> list[Any]:
        return [accepted_answers(value, self.rows) for value in self.rows.column("answers")]

    def predict(self, model: Model, what: str) -> list[Any]:
        """Answers as texts."""
        from ...models.pipelines.pipeline import pipeline

        pipe = pipeline("question-answering", model=model, tokenizer=self.processor)
        examples = [
            {"question": question, "context": context}
            for question, context in zip(texts(self.rows, "question"), texts(self.rows, "context"), strict=True)
        ]
        options: dict[str, Any] = {"handle_impossible_answer": any(not accepted for accepted in self.references)}
        if self.max_length is not None:
            options["max_seq_len"] = min(self.max_length, _QUESTION_TOKENS)
        found: list[Any] = []
        parts = [examples[i : i + self.batch_size] for i in range(0, len(examples), self.batch_size)]
        for part in progress.track(parts, what):
            found += [
                answer["answer"] if answer else "" for answer in pipe(part, batch_size=self.batch_size, **options)
            ]
        return found


def accepted_answers(value: Any, rows: Rows) -> list[str]:
    """Accepted answers of a row: `{"text": [...]}` as in SQuAD, a list, or one text; empty for unanswerable."""
    if isinstance(value, Mapping):
        value = value.get("text")
    if isinstance(value, str):
        return [value]
    if isinstance(value, Sequence) and all(isinstance(text, str) for text in value):
        return list(value)
    raise InputError(
        f"An answer of {rows.sample.source} is {value!r}.",
        fix="give a text, a list of texts, or {'text': [...]} as SQuAD does.",
    )


class Cosines(Predictor):
    """The cosine of the embeddings of a row's two entries: the first ones of all rows stand before the second ones."""

    def predict(self, model: Model, what: str) -> list[Any]:
        """Cosines."""
        rows: list[torch.Tensor] = [torch.empty(0)] * len(self.encoded)
        for part, feeds, output in self.batches(model, what):
            for i, row in zip(part, self._embeddings(feeds, output), strict=True):
                rows[i] = row
        embeddings = torch.stack(rows)
        first, second = embeddings[: len(self.rows)], embeddings[len(self.rows) :]
        found: list[float] = _SIMILARITY[self.settings.similarity](first, second).tolist()
        return found

    def _embeddings(self, feeds: Mapping[str, torch.Tensor], output: Any) -> torch.Tensor:
        """`(rows, size)` on the host."""
        return _on_host(output["embeddings"])

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Numbers are hardly ever the same."""
        return None


_SIMILARITY: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cosine": torch.nn.functional.cosine_similarity,
    "dot": lambda first, second: (first * second).sum(-1),
    "euclidean": lambda first, second: -(first - second).norm(dim=-1),
    "manhattan": lambda first, second: -(first - second).abs().sum(-1),
}
"""By sentence-transformers' words; the more alike, the larger."""


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().cpu()


class Similarities(Cosines):
    """How alike the embeddings of a row's two texts are: their cosine, or what the model's own files name."""

    kind = "similarities"

    def _references(self) -> list[Any]:
        return numbers(self.rows, "score")

    def _longest(self, limit: int | None, asked: int | None) -> int | None:
        found = super()._longest(limit, asked)
        own = self.settings.max_length
        return found if own is None or (found is not None and found < own) else own

    def _encode(self) -> Encoded:
        both = texts(self.rows, "text") + texts(self.rows, "text_pair")
        self._vectors = SentenceVectors(self.settings)
        reader = SentenceRows(self.processor, self.settings, self.max_length)
        with quiet():
            rows = reader.rows(both)
        tokens = {name: [row[name] for row in rows] for name in rows[0]}
        return replace(from_tokenizer({}, self.processor), tokens=tokens)

    def _embeddings(self, feeds: Mapping[str, torch.Tensor], output: Any) -> torch.Tensor:
        return self._vectors(output, feeds.get("attention_mask"), feeds.get(COUNTED)).cpu()


class NextTokens(Predictor):
    """How well each next token of a row was predicted, in windows of `max_length` tokens; none of them is left out, and no
    window sees a token of another.
    """

    kind = "tokens"

    def _references(self) -> list[Any]:
        return [None] * len(self.rows)

    def _longest(self, limit: int | None, asked: int | None) -> int | None:
        # All tokens' logits are needed at once: 600 MB for 1,024 tokens of a vocabulary of 150,000.
        return asked or min(super()._longest(limit, asked) or _WINDOW, _WINDOW)

    def _encode(self) -> Encoded:
        length = self.max_length or _WINDOW
        self.batch_size = max(1, min(self.batch_size, _TOKENS_A_CALL // length))
        with quiet():
            found = self.processor(texts(self.rows, "text"))["input_ids"]
        pieces = [
            (row, tokens[i : i + length])
            for row, tokens in enumerate(found)
            for i in range(0, len(tokens), length)
            if len(tokens) - i > 1
        ]
        if not pieces:
            raise InputError(
                f"No text of {self.rows.sample.source} has two tokens: there is nothing to predict.",
                fix="give longer texts.",
            )
        self._row_of = [row for row, _ in pieces]
        tokens = [piece for _, piece in pieces]
        pad = self.processor.pad_token_id
        return Encoded(
            tokens={"input_ids": tokens, "attention_mask": [[1] * len(piece) for piece in tokens]},
            # What stands behind the last token of a window is not looked at.
            padding={"input_ids": pad if pad is not None else tokens[0][0]},
        )

    def predict(self, model: Model, what: str) -> list[Any]:
        """A `TokenScores` for each row, its windows together."""
        losses = np.zeros(len(self.rows))
        found: list[list[int]] = [[] for _ in range(len(self.rows))]
        for part, feeds, output in self.batches(model, what):
            logits, targets = output["logits"][:, :-1].cpu(), feeds["input_ids"][:, 1:]
            counts = feeds["attention_mask"][:, 1:].sum(1).tolist()
            for place, window in enumerate(part):
                row, count = self._row_of[window], counts[place]
                kept = logits[place, :count].float()
                losses[row] += float(torch.nn.functional.cross_entropy(kept, targets[place, :count], reduction="sum"))
                found[row] += kept.argmax(-1).tolist()
        return [TokenScores(float(loss), len(row), tuple(row)) for loss, row in zip(losses, found, strict=True)]

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Share of tokens."""
        return super().agreement([t for row in first for t in row.best], [t for row in second for t in row.best])


def classifier(config: Any) -> type[Predictor]:
    """Classes, or a number where the model has one output.

    Raises:
        TaskError: A model with several labels a row.
    """
    kind = getattr(config, "problem_type", None)
    if kind == "multi_label_classification":
        raise TaskError("Models with several labels a row cannot be measured yet.", fix="measure them yourself.")
    return Numbers if kind == "regression" or getattr(config, "num_labels", 2) == 1 else Classes


def predictor_for(task: str, config: Any) -> type[Predictor]:
    """The predictor of a task's models with this config.

    Raises:
        ConfigError: The task cannot be measured.
    """
    one = load_task(task)
    chosen: type[Predictor] | None = one.predictor(config)
    if chosen is None:
        raise ConfigError(
            f"accel cannot measure {one.spec.name} yet.", fix=f"measure one of {', '.join(measured_tasks())}."
        )
    return chosen


def _takes(model: Model) -> set[str]:
    """Names of the inputs of a PyTorch model's forward, or of a generating model's."""
    if isinstance(model, ORTModel):
        return {"input_ids", "attention_mask"}
    inner = model.unwrapped if isinstance(model, capture.Wrapper) else model
    return set(inspect.signature(inner.forward).parameters)
