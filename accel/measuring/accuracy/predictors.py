"""What a model answers to rows of a task, in the form that its metrics compare: classes, tags, answers, numbers, tokens.

A predictor turns rows into inputs and references once, and any number of models into predictions. `Task.predictor` names
the one of a task; those that several tasks share are here.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from ... import progress
from ...artifact.sentence_settings import SentenceSettings, sentence_settings
from ...data.batches import Encoded, encode, for_graph, longest
from ...data.labels import label_ids, texts
from ...data.rows import Rows
from ...errors import ConfigError, InputError
from ...interfaces.task_registry import load_task, measured_tasks
from ...interfaces.wrapper import unwrapped
from ...models.base import ORTModel
from .metrics import SYNONYMS, Metric, class_metrics, through_evaluate

Model = ORTModel | torch.nn.Module
Batch = tuple[list[int], Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]


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
        kind: What predictions are, in messages.
        references: What is right, one a row.
        encoded: The rows as inputs.
        max_length: Tokens that longer rows were cut to.
        batch_size: Rows a call.
        by_length: As given.
    """

    kind: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """Metrics of the predictions that work offline, by name, the default first.

        Args:
            classes: Of the model.
        """

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

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return class_metrics(classes)

    def _references(self) -> list[Any]:
        return label_ids(self.rows, "label", self.config)

    def predict(self, model: Model, what: str) -> list[Any]:
        """Class numbers."""
        return self._by_row(model, what, lambda logits, _: logits.argmax(-1).tolist())


class Candidates(Classes):
    """The likeliest of the data's classes for an image, by their names alone.

    Attributes:
        template: What transformers' pipeline makes of a candidate.
        output: The model's output `(rows, candidates)`.
    """

    template: ClassVar[str]
    output: ClassVar[str]

    def _references(self) -> list[Any]:
        """The place of each row's class among the names.

        Raises:
            InputError: Classes without names.
        """
        assert self.rows.sample.columns is not None
        column = self.rows.sample.columns["label"]
        names = getattr(self.rows.dataset.features[column], "names", None)
        values = self.rows.column("label")
        if names:
            self.names = list(names)
            if any(value is None or not 0 <= value < len(names) for value in values):
                raise InputError(f"Rows of {self.rows.sample.source} have no label.", fix="use a labelled split.")
            return list(values)
        if not all(isinstance(value, str) for value in values):
            raise InputError(
                f"The labels in the column {column!r} are numbers without names, which are what rows are compared with.",
                fix="give the names of the classes.",
            )
        self.names = sorted(set(texts(self.rows, "label")))
        return [self.names.index(value) for value in values]

    def _encode(self) -> Encoded:
        candidates = [self.template.format(name) for name in self.names]
        return self._beside(candidates)

    @abc.abstractmethod
    def _beside(self, candidates: Sequence[str]) -> Encoded:
        """The rows as inputs, with the candidates beside every batch of them."""

    def predict(self, model: Model, what: str) -> list[Any]:
        """Places among the names."""
        predictions: list[Any] = [None] * len(self.rows)
        for part, _, output in self.batches(model, what):
            for i, value in zip(part, output[self.output].float().argmax(-1).tolist(), strict=True):
                predictions[i] = value
        return predictions


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


def metric_for(
    name: str | None, predictor: type[Predictor], *, classes: int = 2, trust_remote_code: bool = False
) -> Metric:
    """The metric of that name.

    Args:
        name: One of the predictor's, another one of `evaluate`'s, or the path of a metric script; the predictor's first when `None`.
        predictor: What makes the predictions.
        classes: Of the model.
        trust_remote_code: Allow a metric of a Hub user, whose script is run.

    Raises:
        ConfigError: A metric that does not exist, does not fit the predictions, or cannot be reached from here.
    """
    offered = predictor.metrics(classes)
    if name is None:
        return next(iter(offered.values()))
    plain = SYNONYMS.get(name, name)
    if plain in offered:
        return offered[plain]
    others = (load_task(task).predictor(None) for task in measured_tasks())
    if any(other is not None and plain in other.metrics(classes) for other in others):
        raise ConfigError(f"{name} does not measure {predictor.kind}.", fix=f"use one of {', '.join(offered)}.")
    return through_evaluate(name, tuple(offered), trust_remote_code)


def _takes(model: Model) -> set[str]:
    """Names of the inputs of a PyTorch model's forward, or of a generating model's."""
    if isinstance(model, ORTModel):
        return {"input_ids", "attention_mask"}
    inner = unwrapped(model)
    return set(inspect.signature(inner.forward).parameters)
