"""Weights of a graph that stay in the checkpoint's files: `numpy` reads the values each time, and nothing keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from accel.capture import ModelWeight, empty_weight


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """A parameter, or a part of it, in the layout in which a graph needs it.

    Attributes:
        weight: The parameter's values in the checkpoint.
        view: A view of the parameter's memory, which contains no values. Only its address, shape and strides are used.
    """

    weight: ModelWeight
    view: np.ndarray

    def of(self, values: np.ndarray) -> np.ndarray:
        """Return this part of the parameter's values, as a view of `values`."""
        offset = (self.view.__array_interface__["data"][0] - self.weight.address) // values.itemsize
        start = values.reshape(-1)[offset:]
        return np.lib.stride_tricks.as_strided(start, self.view.shape, self.view.strides)

    def read(self) -> np.ndarray:
        """Read this part of the parameter."""
        return self.of(self.weight.read().numpy())


class CheckpointTensor(ir.LazyTensor):  # type: ignore[misc]  # mypy skips onnx_ir
    """A float32 weight that is read from the checkpoint each time its values are needed.

    Args:
        parts: The parts of the weight, which are concatenated along the last axis. Each part is a part of the checkpoint, or an array.
        name: The name of the weight.
    """

    def __init__(self, parts: Sequence[CheckpointPart | np.ndarray], name: str | None = None) -> None:
        views = [part.view if isinstance(part, CheckpointPart) else part for part in parts]
        shape = (*views[0].shape[:-1], sum(view.shape[-1] for view in views))
        super().__init__(self.read, dtype=ir.DataType.FLOAT, shape=ir.Shape(shape), name=name)
        self.parts = tuple(parts)
        self._view = views[0] if len(views) == 1 else None

    @property
    def raw(self) -> np.ndarray | None:
        """The view of the parameter's memory, which identifies the weight; `None` if the weight has several parts."""
        return self._view

    def read(self) -> ir.Tensor:
        """Read the weight and return it as a tensor in memory."""
        arrays = [part.read() if isinstance(part, CheckpointPart) else part for part in self.parts]
        if len(arrays) == 1:
            return ir.Tensor(arrays[0], name=self.name)
        # The last axis of weights of linear layers is the first axis of the parameters, so the transposed array is filled row by row.
        shape = tuple(reversed(tuple(self.shape)))
        values = empty_weight(int(np.prod(shape))).numpy().reshape(shape)
        end = 0
        for array in arrays:
            start, end = end, end + array.shape[-1]
            values[start:end] = array.T
        return ir.Tensor(values.T, name=self.name)


def concatenated(tensors: Sequence[ir.TensorProtocol | np.ndarray]) -> np.ndarray | CheckpointTensor:
    """Concatenate weights along the last axis. Weights in a checkpoint are not read."""
    if not any(isinstance(tensor, CheckpointTensor) for tensor in tensors):
        return np.concatenate([t if isinstance(t, np.ndarray) else t.numpy() for t in tensors], axis=-1)
    parts: list[CheckpointPart | np.ndarray] = []
    for tensor in tensors:
        if isinstance(tensor, CheckpointTensor):
            parts += tensor.parts
        else:
            parts.append(tensor if isinstance(tensor, np.ndarray) else tensor.numpy())
    return CheckpointTensor(parts)
