"""Run a graph on tensors, with rows of several callers in one model call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from ..models.base import ORTModel
from .batch_formation import can_pad
from .job import Options, PreparedRequest, Row

_SEQUENCE = "sequence"


class TensorHandler:
    """Run a graph on input tensors by name and return its outputs by name.

    Requests can share a call if their tensors have the same sizes in all dimensions other than the batch. If padding does not change the
    outputs (`can_pad`), shorter rows are also padded to the longest row, and the padding is removed from their outputs.
    """

    def __init__(self, model: ORTModel, tokenizer: Any) -> None:
        self._model = model
        component = model.artifact.components[0]
        self._session = session = model.sessions[component.name]
        self._inputs = {spec.name: spec for spec in session.inputs}
        self._outputs = {spec.name: spec for spec in session.outputs}
        self._pads = can_pad(model)
        firsts = [spec.shape[0] for spec in (*self._inputs.values(), *self._outputs.values()) if spec.shape]
        self._batches = len(firsts) == len(self._inputs) + len(self._outputs) and set(firsts) == {"batch"}
        self._limit = component.max_sizes.get(_SEQUENCE, 0)

    def prepare(self, inputs: Any, options: Options) -> PreparedRequest:
        """Check the tensors of a request and return them as one `Row`."""
        if not isinstance(inputs, Mapping):
            raise InputError(
                f"The inputs are a {type(inputs).__name__}, not a mapping from input name to tensor.",
                fix="pass {name: array}.",
            )
        feeds = self._model.read_inputs(inputs)
        sizes = {name: tuple(tensor.shape) for name, tensor in feeds.items()}
        for name, spec in self._inputs.items():
            if len(sizes[name]) != len(spec.shape):
                raise InputError(
                    f"Input {name!r} has {len(sizes[name])} dimensions, but the graph requires the shape {spec.shape}.",
                    fix=f"pass a tensor with {len(spec.shape)} dimensions.",
                )
        count = {sizes[name][0] for name in sizes} if self._batches else {1}
        if len(count) != 1 or 0 in count:
            raise InputError(
                f"The inputs do not have the same number of rows, or they have no rows: {sizes}.",
                fix="pass at least one row, and the same number of rows for each input.",
            )
        lengths = {
            sizes[name][spec.shape.index(_SEQUENCE)] for name, spec in self._inputs.items() if _SEQUENCE in spec.shape
        }
        if len(lengths) > 1:
            raise InputError(
                f"The inputs do not have the same sequence length: {sizes}.",
                fix="pass the same number of tokens for each input.",
            )
        length = next(iter(lengths), 1)
        if self._limit and length > self._limit:
            raise InputError(
                f"The inputs have {length} tokens, but the model accepts at most {self._limit}.",
                fix="shorten the inputs.",
            )
        # Requests with the same `group` can share a call. The group contains all sizes that must be equal within a
        # batch.
        free = {"batch", _SEQUENCE} if self._pads else {"batch"}
        group = tuple(
            tuple(size for size, axis in zip(sizes[name], spec.shape, strict=True) if axis not in free)
            for name, spec in self._inputs.items()
        )
        alone = () if self._batches else (id(inputs),)
        return PreparedRequest([[Row(inputs=feeds, length=length, count=count.pop(), group=("tensors", group, alone))]])

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """Run the rows in one call of the graph and return the outputs of each row by name."""
        width = max(row.length for row in rows)
        if len(rows) == 1:
            return [self._session.run(rows[0].inputs)]
        feeds = {
            name: torch.cat([self._padded(name, row.inputs[name], width) for row in rows]) for name in self._inputs
        }
        returned = self._session.run(feeds)
        outputs, start = [], 0
        for row in rows:
            outputs.append(
                {name: self._cut(name, returned[name][start : start + row.count], row.length) for name in returned}
            )
            start += row.count
        return outputs

    def _padded(self, name: str, tensor: torch.Tensor, width: int) -> torch.Tensor:
        spec = self._inputs[name]
        if _SEQUENCE not in spec.shape:
            return tensor
        axis = spec.shape.index(_SEQUENCE)
        amount = [0, 0] * (tensor.ndim - axis - 1) + [0, width - int(tensor.shape[axis])]
        return torch.nn.functional.pad(tensor, amount, value=spec.pad_value)

    def _cut(self, name: str, tensor: torch.Tensor, length: int) -> torch.Tensor:
        spec = self._outputs.get(name)
        if spec is None or _SEQUENCE not in spec.shape:
            return tensor
        return tensor.narrow(spec.shape.index(_SEQUENCE), 0, length)

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """Return the outputs of the request's only row."""
        return outputs[0][0]
