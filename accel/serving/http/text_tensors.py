"""Texts over the Open Inference Protocol: a model's own operation as one more model there, called `NAME.text`, whose metadata says so.

Inputs and outputs are those that `accel deploy triton` gives the task, so that one client asks both servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...models.base import ORTModel
from ..operations import Operation, operations_of, usual_operation
from .replies import HttpError

SUFFIX = ".text"

Arrays = dict[str, "np.ndarray[Any, Any]"]
_DTYPES: Mapping[str, Any] = {"BYTES": object, "FP32": np.float32, "INT64": np.int64}


def text_operation(model: ORTModel) -> Operation | None:
    """The operation that serves a model as text, if there is one."""
    usual = usual_operation(model)
    return next((one for one in (usual, *operations_of(model).values()) if one.tensor_outputs(model)), None)


def input_sizes(operation: Operation) -> dict[str, int]:
    """Texts of a row by input: 1, or -1 for any number."""
    return {use.upper(): -1 if use in operation.lists else 1 for use in operation.reads}


def described(operation: Operation, model: ORTModel) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Inputs and outputs as the protocol's metadata has them."""
    inputs = [{"name": name, "datatype": "BYTES", "shape": [-1, size]} for name, size in input_sizes(operation).items()]
    outputs = [
        {"name": name, "datatype": datatype, "shape": [-1, size]}
        for name, (datatype, size) in operation.tensor_outputs(model).items()
    ]
    return inputs, outputs


def rows_of(operation: Operation, given: Mapping[str, np.ndarray[Any, Any]]) -> list[Any]:
    """The engine's inputs, a row each.

    Args:
        operation: Of the model.
        given: Texts by name: (rows, texts); (rows,) where a row has one.

    Raises:
        HttpError: Other inputs than it takes, or of other shapes.
    """
    sizes = input_sizes(operation)
    if given.keys() != sizes.keys():
        raise HttpError(422, f"The inputs are {sorted(given)}.", fix=f"send {', '.join(sizes)}.")
    texts: dict[str, Any] = {}
    for name, size in sizes.items():
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
    return [
        operation.inputs(
            {name.lower(): array[i][0] if sizes[name] == 1 else list(array[i]) for name, array in texts.items()}
        )
        for i in range(count.pop())
    ]


def arrays_of(operation: Operation, found: Sequence[Any], model: ORTModel) -> Arrays:
    """The outputs: (rows, values); text as objects.

    Args:
        operation: Of the model.
        found: The engine's answers, a row each.
        model: Whose they are.
    """
    rows = [operation.tensor_values(one, model) for one in found]
    kinds = {name: datatype for name, (datatype, _) in operation.tensor_outputs(model).items()}
    return {name: np.array([row[name] for row in rows], dtype=_DTYPES[kind]) for name, kind in kinds.items()}
