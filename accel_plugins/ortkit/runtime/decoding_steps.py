"""Decoding steps with one new token in each row; the steps reuse IO bindings and skip checks that earlier steps made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from accel.artifact import TensorSpec
from accel.interfaces.io_binding_steps import BoundSteps
from accel.interfaces.protocols import Feeds
from accel.interfaces.session import BaseSession
from accel.interfaces.state import State

from ..upstream import native_value
from .state import HOST, LENGTHS, OrtState

_ONE = {"sequence": 1, "kept": 1}


class OrtDecodingSteps(BoundSteps):
    """Single-token decoding steps for a state in CPU memory whose keys and values are written in place.

    Each step overwrites the logits of the previous step.
    """

    def __init__(self, session: BaseSession[Any], state: OrtState, feeds: Feeds, calls: int) -> None:
        super().__init__(session, state, feeds, calls)
        self._state = state
        sizes = {"batch": state._batch, **_ONE}
        self._results = {
            spec.name: torch.empty(_shape(spec, sizes), dtype=getattr(torch, spec.dtype)) for spec in state._results
        }
        self._logits: np.ndarray = self._results["logits"][:, -1].numpy()
        self._binding: Any = None
        self._last: np.ndarray | None = None

    @staticmethod
    def fits(state: State, feeds: Feeds, calls: int) -> bool:
        """Return whether this class supports the state, the inputs and the number of calls."""
        return (
            isinstance(state, OrtState)
            and state._where == HOST
            and bool(state._in_place)
            and not state._replaced
            and state._front is None
            and all(isinstance(axis, int) or axis in ("batch", *_ONE) for spec in state._results for axis in spec.shape)
            and BoundSteps.fits(state, feeds, calls)
        )

    def bound(self, mask: torch.Tensor) -> Any:
        """Return a value of ONNX Runtime that shares memory with an attention mask."""
        return native_value(mask)

    def compute(self, mask: Any) -> np.ndarray:
        """Run one step and return the logits; see `BoundSteps.compute`."""
        state = self._state
        total = state._length + 1
        binding = state._reserve(total)
        if binding is not self._binding:
            # The binding is new at the first step and after the buffers have grown. It contains only the cache buffers.
            for name, tensor in self.feeds.items():
                binding.read(name, tensor)
            if state._lengths:
                binding.read(LENGTHS, state._last)
                self._last = state._last.numpy()
            for name, result in self._results.items():
                binding.write(name, result)
            self._binding = binding
        if self._last is not None:
            self._last.fill(total - 1)
        if mask is not None and self.mask_name is not None:
            binding.read_native(self.mask_name, mask)
        binding.run()
        state._length = total
        return self._logits


def _shape(spec: TensorSpec, sizes: Mapping[str, int]) -> list[int]:
    return [axis if isinstance(axis, int) else sizes[axis or ""] for axis in spec.shape]
