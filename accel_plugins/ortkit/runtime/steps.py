"""Calls of one new token a row, with next to nothing bound or checked anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from accel.artifact import TensorSpec
from accel.interfaces.bound_steps import BoundSteps
from accel.interfaces.protocols import Feeds
from accel.interfaces.session import BaseSession
from accel.interfaces.state import State

from ..upstream import native_value
from .state import HOST, LENGTHS, OrtState

_ONE = {"sequence": 1, "kept": 1}


class OrtSteps(BoundSteps):
    """Steps of a state on the host whose keys and values are written in place. The logits are written over by the next step."""

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
        """Whether the state can go on so."""
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
        """ONNX Runtime's value over a mask."""
        return native_value(mask)

    def compute(self, mask: Any) -> np.ndarray:
        """Run the call; see `BoundSteps.compute`."""
        state = self._state
        total = state._length + 1
        binding = state._reserve(total)
        if binding is not self._binding:
            # A new one, with the buffers alone: at first, and when they have grown.
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
