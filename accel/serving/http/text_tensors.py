"""Texts over the Open Inference Protocol: a model's own task as one more model there, called `NAME.text`, whose metadata says so.

Inputs and outputs are those that `accel deploy triton` gives the task, so that one client asks both servers. Another task is a
line in `SERVICES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...models.base import ORTModel
from .replies import HttpError

SUFFIX = ".text"

Arrays = dict[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A task as tensors of texts.

    Attributes:
        operation: Of the engine.
        inputs: Texts of a row by name: 1, or -1 for any number.
        outputs: Type and values of a row by name, -1 for any number; of a model.
        options: Of the operation.
        ask: The engine's inputs, of the texts of one row each.
        answer: The values of a row by output, of the engine's answer.
        together: Whether the engine takes rows as a list.
    """

    operation: str
    inputs: Mapping[str, int]
    outputs: Callable[[ORTModel], Mapping[str, tuple[str, int]]]
    options: Mapping[str, Any]
    ask: Callable[[Mapping[str, Sequence[str]]], Any]
    answer: Callable[[Any, ORTModel], Mapping[str, Sequence[Any]]]
    together: bool = True

    def described(self, model: ORTModel) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Inputs and outputs as the protocol's metadata has them."""
        inputs = [{"name": name, "datatype": "BYTES", "shape": [-1, size]} for name, size in self.inputs.items()]
        outputs = [
            {"name": name, "datatype": datatype, "shape": [-1, size]}
            for name, (datatype, size) in self.outputs(model).items()
        ]
        return inputs, outputs

    def rows(self, given: Mapping[str, np.ndarray[Any, Any]]) -> list[Any]:
        """The engine's inputs, a row each.

        Args:
            given: Texts by name: (rows, texts); (rows,) where a row has one.

        Raises:
            HttpError: Other inputs than it takes, or of other shapes.
        """
        if given.keys() != self.inputs.keys():
            raise HttpError(422, f"The inputs are {sorted(given)}.", fix=f"send {', '.join(self.inputs)}.")
        texts: dict[str, Any] = {}
        for name, size in self.inputs.items():
            array = given[name]
            if array.ndim == 1 and size == 1:
                array = array[:, None]
            if array.ndim != 2 or not array.size or size not in (-1, array.shape[1]):
                raise HttpError(
                    422, f"Input {name!r} has the shape {list(given[name].shape)}.", fix=f"use [rows, {'texts' if size < 0 else size}]."
                )  # fmt: skip
            texts[name] = array
        count = {len(array) for array in texts.values()}
        if len(count) != 1:
            raise HttpError(422, f"The inputs have {sorted(count)} rows.", fix="send as many of each.")
        return [self.ask({name: list(array[i]) for name, array in texts.items()}) for i in range(count.pop())]

    def arrays(self, found: Sequence[Any], model: ORTModel) -> Arrays:
        """The outputs: (rows, values); text as objects.

        Args:
            found: The engine's answers, a row each.
            model: Whose they are.
        """
        rows = [self.answer(one, model) for one in found]
        kinds = {name: datatype for name, (datatype, _) in self.outputs(model).items()}
        return {name: np.array([row[name] for row in rows], dtype=_DTYPES[kind]) for name, kind in kinds.items()}


_DTYPES: Mapping[str, Any] = {"BYTES": object, "FP32": np.float32, "INT64": np.int64}


def service_of(operations: Sequence[str]) -> Service | None:
    """What serves a model as text, if anything does.

    Args:
        operations: Of the engine for the model.
    """
    return next((one for one in SERVICES if one.operation in operations), None)


def _labels(model: ORTModel) -> list[str]:
    return [str(model.config.id2label[i]) for i in range(model.config.num_labels)]


def _classified(found: Any, model: ORTModel) -> dict[str, list[Any]]:
    scores = {one["label"]: one["score"] for one in found}
    best = max(found, key=lambda one: one["score"])
    return {"LABEL": [best["label"]], "SCORE": [best["score"]], "SCORES": [scores[name] for name in _labels(model)]}


def _ranked(found: Any, model: ORTModel) -> dict[str, list[Any]]:
    order = [one["corpus_id"] for one in found]
    scores = {one["corpus_id"]: one["score"] for one in found}
    return {"SCORES": [scores[i] for i in range(len(order))], "RANKING": order}


def _best_answer(found: Any, model: ORTModel) -> dict[str, list[Any]]:
    return {name: [found[name.lower()]] for name in ("ANSWER", "SCORE", "START", "END")}


def _hidden_size(model: ORTModel) -> int:
    """Of an embedding; -1 where the graph does not say."""
    outputs = {spec.name: spec.shape[-1] for spec in model.artifact.components[0].outputs}
    size = outputs.get("sentence_embedding", outputs.get("last_hidden_state"))
    return size if isinstance(size, int) else -1


SERVICES: tuple[Service, ...] = (
    Service(
        operation="rank", inputs={"QUERY": 1, "DOCUMENTS": -1}, options={},
        outputs=lambda _: {"SCORES": ("FP32", -1), "RANKING": ("INT64", -1)},
        ask=lambda row: (row["QUERY"][0], row["DOCUMENTS"]), answer=_ranked, together=False,
    ),
    Service(
        operation="text-classification", inputs={"TEXT": 1}, options={"top_k": None},
        outputs=lambda model: {"LABEL": ("BYTES", 1), "SCORE": ("FP32", 1), "SCORES": ("FP32", len(_labels(model)))},
        ask=lambda row: row["TEXT"][0], answer=_classified,
    ),
    Service(
        operation="token-classification", inputs={"TEXT": 1}, options={},
        outputs=lambda _: {"ENTITIES": ("BYTES", 1)},
        ask=lambda row: row["TEXT"][0],
        answer=lambda found, _: {"ENTITIES": [json.dumps(found, ensure_ascii=False, allow_nan=False, default=lambda one: one.tolist())]},
    ),
    Service(
        operation="question-answering", inputs={"QUESTION": 1, "CONTEXT": 1}, options={},
        outputs=lambda _: {"ANSWER": ("BYTES", 1), "SCORE": ("FP32", 1), "START": ("INT64", 1), "END": ("INT64", 1)},
        ask=lambda row: {"question": row["QUESTION"][0], "context": row["CONTEXT"][0]}, answer=_best_answer,
    ),
    Service(
        operation="embed", inputs={"TEXT": 1}, options={},
        outputs=lambda model: {"EMBEDDING": ("FP32", _hidden_size(model))},
        ask=lambda row: row["TEXT"][0], answer=lambda found, _: {"EMBEDDING": found},
    ),
)  # fmt: skip
"""The first one that a model does is its own."""
