"""What sessions say about themselves: a base that spares a plugin some properties. No session need have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..artifact.tensors import TensorSpec
from .session_contract import ShapeCheck, ValueCheck, read_feeds, tensor_dtypes
from .specs import DeviceSpec

if TYPE_CHECKING:
    import torch

    from .protocols import Feeds


class SessionDescription:
    """The described part of `accel.interfaces.protocols.Session`, and the checks of a call's inputs against it: `_check_shapes`,
    `_check_values`, and `_read`, which does all that the contract asks.

    Args:
        inputs: What `run` takes, in the graph's order.
        outputs: What it returns, in the graph's order.
        device: Where it runs, as the opened runtime says.
        compute_dtype: What the kernels really compute in.
        fixed: Sizes that it was opened with for named axes.
        limits: The largest sizes of named axes that the model has positions for.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        device: DeviceSpec,
        compute_dtype: str,
        *,
        fixed: Mapping[str, int] | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._device = device
        self._compute_dtype = compute_dtype
        self._check_shapes = ShapeCheck(self._inputs, fixed, limits)
        self._check_values = ValueCheck(self._inputs)

    def _read(self, feeds: Feeds, dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, torch.Tensor]:
        """A call's inputs in the graph's order, of its types, where the caller has them.

        Raises:
            InputError: Names, types, shapes or values that the graph does not take.
        """
        tensors = read_feeds(feeds, dtypes if dtypes is not None else tensor_dtypes(self._inputs))
        self._check_shapes(tuple([tuple(tensor.shape) for tensor in tensors.values()]))
        self._check_values(tensors)
        return tensors

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
