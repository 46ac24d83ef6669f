"""Predictors: turn rows into inputs and references once, and run any number of models on them.

Metrics compare predictions: classes, tags, answers, numbers, tokens. `Task.predictor` returns the predictor class of a task. Predictors
that several tasks share are in this module.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ... import progress
from ...artifact.sentence_settings import SentenceSettings, sentence_settings
from ...data.batches import encode, for_graph, longest
from ...data.encoded_rows import EncodedRows
from ...data.labels import label_ids, texts
from ...data.rows import DatasetRows
from ...errors import ConfigError, InputError
from ...interfaces.task_registry import load_task, measured_tasks
from ...interfaces.tracing_wrapper import unwrapped
from ...models.base import ORTModel
from .metrics import SYNONYMS, Metric, class_metrics, through_evaluate

Model = ORTModel | torch.nn.Module
Batch = tuple[list[int], Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]


class Predictor(abc.ABC):
    """Base class of predictors, which hold the rows as inputs and references.

    Args:
        rows: Labelled rows, with mapped columns.
        task: Task of the models.
        config: Transformers config of the models, which has the labels.
        processor: Tokenizer or image processor of the models.
        max_length: Number of tokens after which longer rows are truncated; `None` for the model's limit.
        limit: Number of positions of the models; `None` if there is no limit.
        batch_size: Number of rows in each call.
        folder: Folder with the models' files, if there is one.
        by_length: If true, rows of similar length share a call. If false, rows are batched in their original order.

    Attributes:
        kind: Name of the predictions in messages.
        offline_metrics: Metrics of the predictions that work without the Hub, the default first.
        references: The correct answers, one for each row.
        encoded: The rows as model inputs.
        max_length: Number of tokens after which longer rows were truncated.
        batch_size: Number of rows in each call.
    """

    kind: ClassVar[str]
    offline_metrics: ClassVar[tuple[Metric, ...]]

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """Return `offline_metrics` by name. Override this method if the metrics depend on the model's number of classes."""
        return {metric.name: metric for metric in cls.offline_metrics}

    def __init__(
        self,
        rows: DatasetRows,
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

    def _longest(self, limit: int | None, max_length: int | None) -> int | None:
        return longest(limit, self.processor, max_length)

    @abc.abstractmethod
    def _references(self) -> list[Any]:
        """Return the correct answers, one for each row."""

    def _encode(self) -> EncodedRows:
        return encode(self.rows, self.task, self.processor, self.max_length)

    @abc.abstractmethod
    def predict(self, model: Model, what: str) -> list[Any]:
        """Return one prediction for each row."""

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Return the fraction of equal predictions (by row, tag or token) of two models; `None` if predictions are floats or arrays.

        Class numbers are `int` and are compared. Floats and arrays of two models are never equal, so comparing them would mean nothing.
        """
        if any(isinstance(prediction, float | np.floating | np.ndarray | torch.Tensor) for prediction in first):
            return None
        return sum(bool(a == b) for a, b in zip(first, second, strict=True)) / len(first)

    def batches(self, model: Model, what: str, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """Run a model on all rows, or on `rows`; yield the row numbers, the inputs and the outputs of each batch."""
        plan = self.encoded.plan(self.batch_size, by_length=self.by_length)
        if rows is not None:
            chosen = set(rows)
            plan = [chosen_part for part in plan if (chosen_part := [i for i in part if i in chosen])]
        takes = _takes(model)
        with torch.inference_mode():
            done, total = 0, sum(map(len, plan))
            progress.report(what, done, total)
            for part in plan:
                feeds = self.encoded.batch(part)
                if isinstance(model, ORTModel) and not model.can_generate():
                    component = model.artifact.components[0]
                    inputs: Mapping[str, torch.Tensor] = for_graph(feeds, component.inputs, component.own_defaults)
                else:
                    inputs = {name: value for name, value in feeds.items() if name in takes}
                yield part, feeds, model(**inputs)
                done += len(part)
                progress.report(what, done, total)

    def _by_row(
        self, model: Model, what: str, values: Callable[[torch.Tensor, Sequence[int]], Sequence[Any]]
    ) -> list[Any]:
        """Return one prediction for each row, computed by `values` from the logits and row numbers of each batch."""
        predictions: list[Any] = [None] * len(self.rows)
        for part, _, output in self.batches(model, what):
            for i, value in zip(part, values(output["logits"].float().cpu(), part), strict=True):
                predictions[i] = value
        return predictions


class ClassPredictor(Predictor):
    """Predictor of the most likely class of a row, as a class number."""

    kind = "classes"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """Return the metrics of class numbers by name."""
        return class_metrics(classes)

    def _references(self) -> list[Any]:
        return label_ids(self.rows, "label", self.config)

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return one class number for each row."""
        return self._by_row(model, what, lambda logits, _: logits.argmax(-1).tolist())


class ZeroShotPredictor(ClassPredictor):
    """Zero-shot predictor: compare each row with the class names of the data, and predict the most likely class.

    Attributes:
        template: Sentence into which transformers' pipeline inserts a class name.
        output: Name of the model output `(rows, candidates)`.
    """

    template: ClassVar[str]
    output: ClassVar[str]

    def _references(self) -> list[Any]:
        """Return the index of each row's class in `names`.

        Raises:
            InputError: The classes have no names, or rows have no label.
        """
        names = getattr(self.rows.feature("label"), "names", None)
        values = self.rows.column("label")
        if names:
            self.names = list(names)
            if any(value is None or not 0 <= value < len(names) for value in values):
                raise InputError(
                    f"Some rows of {self.rows.sample.source} have no label, or a label that is not the index of a class name.",
                    fix="use a split of the data with labels, such as train or validation.",
                )
            return list(values)
        if not all(isinstance(value, str) for value in values):
            raise InputError(
                f"The labels in the column {self.rows.name_of('label')!r} are numbers without names, but a zero-shot model compares each "
                "row with the class names.",
                fix="use class names in the column, or a `datasets` feature ClassLabel(names=[...]).",
            )
        self.names = sorted(set(texts(self.rows, "label")))
        return [self.names.index(value) for value in values]

    def _encode(self) -> EncodedRows:
        candidates = [self.template.format(name) for name in self.names]
        return self.encode(self.rows, self.processor, candidates, self.max_length)

    @staticmethod
    @abc.abstractmethod
    def encode(rows: DatasetRows, processor: Any, candidates: Sequence[str], max_length: int | None) -> EncodedRows:
        """Encode the rows; each batch also contains the inputs of all candidate classes."""

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return one index in `names` for each row."""
        predictions: list[Any] = [None] * len(self.rows)
        for part, _, output in self.batches(model, what):
            for i, value in zip(part, output[self.output].float().argmax(-1).tolist(), strict=True):
                predictions[i] = value
        return predictions


class CosinePredictor(Predictor):
    """Predictor of the similarity of the embeddings of a row's two entries.

    The encoded inputs are the first entries of all rows, followed by the second entries of all rows.
    """

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return one similarity for each row."""
        rows: list[torch.Tensor] = [torch.empty(0)] * len(self.encoded)
        for part, feeds, output in self.batches(model, what):
            for i, row in zip(part, self._embeddings(feeds, output), strict=True):
                rows[i] = row
        embeddings = torch.stack(rows)
        first, second = embeddings[: len(self.rows)], embeddings[len(self.rows) :]
        similarities: list[float] = _SIMILARITY[self.settings.similarity](first, second).tolist()
        return similarities

    def _embeddings(self, feeds: Mapping[str, torch.Tensor], output: Any) -> torch.Tensor:
        """Return embeddings `(rows, size)` on the host."""
        return _on_host(output["embeddings"])


_SIMILARITY: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cosine": torch.nn.functional.cosine_similarity,
    "dot": lambda first, second: (first * second).sum(-1),
    "euclidean": lambda first, second: -(first - second).norm(dim=-1),
    "manhattan": lambda first, second: -(first - second).abs().sum(-1),
}
"""Similarity functions by sentence-transformers' names; larger values are more similar."""


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().cpu()


def predictor_for(task: str, config: Any) -> type[Predictor]:
    """Return the predictor class of a task, for models with this config.

    Raises:
        ConfigError: accel cannot measure the task.
    """
    loaded = load_task(task)
    chosen: type[Predictor] | None = loaded.predictor(config)
    if chosen is None:
        raise ConfigError(
            f"accel cannot measure the accuracy of the task {loaded.spec.name!r} yet.",
            fix=f"measure a model for one of {', '.join(measured_tasks())}. For a task of your own plugin, implement Task.predictor.",
        )
    return chosen


def metric_for(
    name: str | None, predictor: type[Predictor], *, classes: int = 2, trust_remote_code: bool = False
) -> Metric:
    """Return the metric with the given name.

    Args:
        name: Name of a metric of the predictor or of the `evaluate` library, or path of a metric script. `None` for the
            predictor's first metric.
        predictor: Predictor class of the models.
        classes: Number of classes of the model.
        trust_remote_code: Allow a metric script of a Hub user, which runs on this machine.

    Raises:
        ConfigError: The metric does not exist, does not fit the predictions, or cannot be downloaded.
    """
    offered = predictor.metrics(classes)
    if name is None:
        return next(iter(offered.values()))
    plain = SYNONYMS.get(name, name)
    if plain in offered:
        return offered[plain]
    others = (load_task(task).predictor(None) for task in measured_tasks())
    if any(other is not None and plain in other.metrics(classes) for other in others):
        raise ConfigError(
            f"The metric {name!r} does not fit the model's task, whose predictions are {predictor.kind}.",
            fix=f"use one of {', '.join(offered)}.",
        )
    return through_evaluate(name, tuple(offered), trust_remote_code)


def _takes(model: Model) -> set[str]:
    """Return the input names of a PyTorch model's `forward`, or of a model that generates."""
    if isinstance(model, ORTModel):
        return {"input_ids", "attention_mask"}
    inner = unwrapped(model)
    return set(inspect.signature(inner.forward).parameters)
