"""Process many requests with few calls of a graph: rows of similar length share a call."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .call_costs import CallCosts
from .tokens import Array, GraphRow, InvalidRequestError, NonFiniteOutputError, Tokens

Call = Callable[[Mapping[str, Array]], Mapping[str, Array]]


@dataclass(frozen=True)
class Request:
    """A request of a client.

    Attributes:
        inputs: Input arrays by name, each `(rows, ...)`; texts are bytes.
        options: Parameters of the request.
    """

    inputs: Mapping[str, Array]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class _RequestRow:
    """One row of a request: the rows to run in the graph, and values that are needed later to compute the result."""

    memory: Any
    rows: Sequence[GraphRow]


class TextRequestHandler:
    """Converter from the texts of requests to batches of the graph, and from the outputs of the graph to results.

    Args:
        folder: Folder that contains `settings.json` and `tokenizer.json`.
    """

    def __init__(self, folder: Path) -> None:
        self.settings: Mapping[str, Any] = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        self.tokens = Tokens(folder, self.settings)
        module, _, name = self.settings["service"].partition(":")
        service = getattr(importlib.import_module(f".{module}", __package__), name)
        self.service = service(self.settings["options"], self.tokens)
        self._calls = CallCosts()

    def answer(self, requests: Sequence[Request], call: Call) -> list[dict[str, Array] | InvalidRequestError]:
        """Return, for each request, the output arrays by name, or the reason why the request is invalid.

        Args:
            requests: Requests that arrived together.
            call: Function that runs the graph on one batch. Its argument and its result are tensors `(rows, ...)` by name.
        """
        read: list[list[_RequestRow] | InvalidRequestError] = []
        for request in requests:
            try:
                read.append(self._read(request))
            except InvalidRequestError as reason:
                read.append(reason)
        rows = [
            row for items in read if not isinstance(items, InvalidRequestError) for item in items for row in item.rows
        ]
        returned = iter(self._run(rows, call))
        answers: list[dict[str, Array] | InvalidRequestError] = []
        for request, items in zip(requests, read, strict=True):
            if isinstance(items, InvalidRequestError):
                answers.append(items)
                continue
            with_outputs = [(item, [next(returned) for _ in item.rows]) for item in items]
            try:
                answers.append(self._write(with_outputs, request.options))
            except InvalidRequestError as reason:
                answers.append(reason)
        return answers

    def encode(self, request: Request) -> dict[str, Array]:
        """Return the texts of one request as a padded batch. Each text must be one row of the graph.

        Raises:
            Refused: The texts cannot be tokenized, or a text has several rows.
        """
        items = self._read(request)
        if any(len(item.rows) != 1 for item in items):
            raise InvalidRequestError(
                "the parameter stride is not supported, because the model is deployed as an ensemble"
            )
        return self.tokens.pad([row for item in items for row in item.rows])

    def finish(self, request: Request, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Compute the results of one request from the graph's outputs for the batch that `encode` returned.

        Raises:
            Refused: The request cannot be answered.
        """
        items = self._read(request)
        each = [{name: values[i] for name, values in outputs.items()} for i in range(len(items))]
        return self._write([(item, [row]) for item, row in zip(items, each, strict=True)], request.options)

    def _read(self, request: Request) -> list[_RequestRow]:
        unknown = set(request.options) - set(self.service.options)
        if unknown:
            raise InvalidRequestError(
                f"the request has the unknown parameters {sorted(unknown)}; the model has {sorted(self.service.options)}"
            )
        count = len(next(iter(request.inputs.values())))
        items = []
        for i in range(count):
            texts = {name: [_text(value) for value in values[i]] for name, values in request.inputs.items()}
            items.append(_RequestRow(*self.service.read(texts, request.options)))
        return items

    def _write(
        self, items: Sequence[tuple[_RequestRow, Sequence[Mapping[str, Array]]]], options: Any
    ) -> dict[str, Array]:
        for number, (item, outputs) in enumerate(items):
            for row, output in zip(item.rows, outputs, strict=True):
                name = self._nan(row, output)
                if name is not None:
                    raise NonFiniteOutputError(
                        f"the model computed NaN in its output {name} for text {number}; deploy the model in float32"
                    )
        each = [self.service.write(item.memory, outputs, options) for item, outputs in items]
        shapes = {name: {np.shape(result[name]) for result in each} for name in each[0]}
        if any(len(sizes) > 1 for sizes in shapes.values()):
            raise InvalidRequestError(
                "the rows of one request have results of different sizes; send each row as a separate request"
            )
        answer = {name: _array([result[name] for result in each]) for name in each[0]}
        for name, values in answer.items():
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                index = [int(i) for i in np.argwhere(~np.isfinite(values))[0]]
                raise NonFiniteOutputError(
                    f"the output {name} is NaN or infinite at index {index}; deploy the model in float32"
                )
        return answer

    def _nan(self, row: GraphRow, output: Mapping[str, Array]) -> str | None:
        """Return the name of the first output of a row that contains NaN at a position that is not padding, or `None`."""
        for name, values in output.items():
            if values.dtype.kind == "f" and np.isnan(values).any():
                padded = values.ndim > 0 and len(values) > row.length
                if np.isnan(self.tokens.unpadded(values, row.length) if padded else values).any():
                    return name
        return None

    def _run(self, rows: Sequence[GraphRow], call: Call) -> list[dict[str, Array]]:
        """Run rows and return the graph's outputs for each row; rows of similar length share a call."""
        lengths = [row.length for row in rows]
        order = sorted(range(len(rows)), key=lengths.__getitem__)
        returned: list[dict[str, Array]] = [{} for _ in rows]
        for start, end in self._calls.divide([lengths[i] for i in order], self.settings["max_rows"]):
            batch = self.tokens.pad([rows[i] for i in order[start:end]])
            began = time.perf_counter()
            outputs = call(batch)
            self._calls.note(batch["input_ids"].size, time.perf_counter() - began)
            for index, i in enumerate(order[start:end]):
                returned[i] = {name: values[index] for name, values in outputs.items()}
            if end - start > 1 and any(self._nan(rows[i], returned[i]) is not None for i in order[start:end]):
                # Run each row alone: dynamic quantization computes its scales from all rows of a call, so NaN in one row changes other
                # rows.
                for i in order[start:end]:
                    alone = call(self.tokens.pad([rows[i]]))
                    returned[i] = {name: values[0] for name, values in alone.items()}
        return returned


def option(options: Mapping[str, Any], name: str, default: Any, allowed: Sequence[Any] | type) -> Any:
    """Return a parameter of a request, or its default.

    Raises:
        Refused: The value is not allowed or has the wrong type.
    """
    value = options.get(name, default)
    if value is default:
        return value
    if isinstance(allowed, type):
        # In Python, `bool` is a subclass of `int`, so check it separately.
        if not isinstance(value, allowed) or isinstance(value, bool) is not (allowed is bool):
            raise InvalidRequestError(f"the parameter {name} is {value!r}, but it must be of type {allowed.__name__}")
    elif value not in allowed:
        raise InvalidRequestError(
            f"the parameter {name} is {value!r}, but it must be one of {', '.join(map(repr, allowed))}"
        )
    return value


def _text(value: Any) -> str:
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"a text of the request is not valid UTF-8: {error}") from error


def _array(values: Sequence[Any]) -> Array:
    """Return the values of the rows of a request as one array. Texts become bytes; floats become float32 and integers int64."""
    array = np.asarray(values)
    if array.dtype.kind in "US":
        encoded = [text.encode("utf-8") for text in np.asarray(values, dtype=object).ravel()]
        texts: Array = np.empty(len(encoded), dtype=object)
        texts[:] = encoded
        return texts.reshape(array.shape)
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


def softmax(logits: Array) -> Array:
    """Return the softmax of float32 logits along the last axis."""
    raised: Array = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Array = raised / raised.sum(axis=-1, keepdims=True)
    return result


def sigmoid(logits: Array) -> Array:
    """Return the sigmoid of each value."""
    result: Array = 1.0 / (1.0 + np.exp(-logits))
    return result
