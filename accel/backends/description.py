"""What sessions and their states say about themselves: bases that spare a plugin some properties. None need have them."""

from __future__ import annotations

from collections.abc import Sequence

from ..artifact.tensors import TensorSpec
from .checks import ValueCheck
from .specs import DeviceSpec


class SessionDescription:
    """The described part of `accel.backends.interfaces.Session`, and a check of values against it (`_check_values`).

    Args:
        inputs: What `run` takes, in the graph's order.
        outputs: What it returns, in the graph's order.
        device: Where it runs, as the opened runtime says.
        compute_dtype: What the kernels really compute in.
    """

    def __init__(
        self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], device: DeviceSpec, compute_dtype: str
    ) -> None:
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._device = device
        self._compute_dtype = compute_dtype
        self._check_values = ValueCheck(self._inputs)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """As declared by the artifact."""
        return self._inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """As declared by the artifact."""
        return self._outputs

    @property
    def device(self) -> DeviceSpec:
        """Where it runs, read from the opened runtime."""
        return self._device

    @property
    def compute_dtype(self) -> str:
        """What the kernels really compute in."""
        return self._compute_dtype


class StateDescription:
    """The described part of `accel.backends.interfaces.State`.

    Args:
        batch: Rows held.
    """

    def __init__(self, batch: int) -> None:
        self._batch, self._length = batch, 0

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    @property
    def batch(self) -> int:
        """Rows held."""
        return self._batch
