"""Texts over the Open Inference Protocol: the model name `NAME.text` accepts and returns texts instead of tensors of token ids.

The inputs and outputs are the same as those of the text model that accel writes to a Triton model repository. One client can
therefore use both servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import PluginError
from ...models.base import ORTModel
from ..operations import Operation, operations_of, usual_operation
from .replies import HttpError
from .tensor_formats import Texts, Values

SUFFIX = ".text"

_DTYPES: Mapping[str, Any] = {"BYTES": object, "FP32": np.float32, "INT64": np.int64}


def text_operation(model: ORTModel) -> Operation | None:
    """Return the operation that runs a model on texts instead of token ids, or `None` if the model has no such operation."""
    offered = operations_of(model)
    candidates = (usual_operation(model, offered), *offered.values())
    return next((operation for operation in candidates if operation.tensor_outputs(model)), None)


def input_sizes(operation: Operation) -> dict[str, int]:
    """Return for each input name the number of texts in a row: 1, or -1 for any number."""
    return {use.upper(): -1 if use in operation.lists else 1 for use in operation.reads}


def described(operation: Operation, model: ORTModel) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the descriptions of inputs and outputs for the protocol's metadata."""
    inputs = [{"name": name, "datatype": "BYTES", "shape": [-1, size]} for name, size in input_sizes(operation).items()]
    outputs = [
        {"name": name, "datatype": datatype, "shape": [-1, size]}
        for name, (datatype, size) in operation.tensor_outputs(model).items()
    ]
    return inputs, outputs


def rows_of(operation: Operation, arrays: Mapping[str, Texts]) -> list[Any]:
    """Convert text arrays to inputs of the engine, one for each row.

    Args:
        operation: The operation of the model.
        arrays: Texts by input name, with shape (rows, texts); (rows,) is also accepted for inputs with one text in a row.

    Raises:
        HttpError: The input names or shapes are wrong.
    """
    sizes = input_sizes(operation)
    if arrays.keys() != sizes.keys():
        raise HttpError(
            422,
            f"The request has the inputs {', '.join(sorted(arrays))}, but the model requires {', '.join(sizes)}.",
            fix=f"send exactly the inputs {', '.join(sizes)}.",
        )
    texts: dict[str, Any] = {}
    for name, size in sizes.items():
        array = arrays[name]
        if array.ndim == 1 and size == 1:
            array = array[:, None]
        if array.ndim != 2 or not array.size or size not in (-1, array.shape[1]):
            raise HttpError(
                422,
                f"Input {name!r} has the shape {list(arrays[name].shape)}; expected [rows, {'texts' if size < 0 else size}].",
                fix="send an array of the expected shape with at least one row.",
            )  # fmt: skip
        texts[name] = array
    count = {len(array) for array in texts.values()}
    if len(count) != 1:
        raise HttpError(
            422,
            f"The inputs have different numbers of rows: {', '.join(map(str, sorted(count)))}.",
            fix="send the same number of rows for each input.",
        )
    return [
        operation.inputs(
            {name.lower(): array[i][0] if sizes[name] == 1 else list(array[i]) for name, array in texts.items()}
        )
        for i in range(count.pop())
    ]


def arrays_of(operation: Operation, answers: Sequence[Any], model: ORTModel) -> dict[str, Values]:
    """Convert the results of several rows to output tensors `(rows, values)` by name.

    Raises:
        PluginError: The task returned no list of values for a row, or rows with different numbers of values.
    """
    rows = [operation.tensor_values(answer, model) for answer in answers]
    arrays: dict[str, Values] = {}
    for name, (datatype, size) in operation.tensor_outputs(model).items():
        values = [row[name] for row in rows]
        lengths = {len(value) if isinstance(value, list | tuple | np.ndarray) else None for value in values}
        if len(lengths) != 1 or None in lengths or (size != -1 and lengths != {size}):
            expected = "the same number of values" if size == -1 else f"{size} values"
            raise PluginError(
                f"The operation {operation.name!r} returned values for the output {name!r} that do not form a rectangular tensor: "
                f"{values!r:.200}.",
                fix=f"let `Operation.tensor_values` return a list of {expected} for each row.",
            )
        array = np.array(values, dtype=_DTYPES[datatype])
        arrays[name] = array if array.dtype == object else torch.from_numpy(array)
    return arrays
