"""Single tokens behind a text, with next to nothing bound or checked anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from accel.artifact import TensorSpec
from accel.interfaces.protocols import Feeds
from accel.interfaces.stepping import SingleTokens

from .state import HOST, LENGTHS, OrtState
from .values import RUN_ERRORS, native_value

_ONE = {"sequence": 1, "kept": 1}


class OrtSteps:
    """`TokenStep` of a state on the host whose keys and values are written in place.

    The logits are written over by the next step.

    Args:
        state: Which `fits`.
        feeds: The graph's inputs of the last call, checked, with one token a row.
        calls: How many come, at most.
        failed: Makes the error of a run that failed.
    """

    def __init__(
        self, state: OrtState, feeds: Feeds, calls: int, failed: Callable[[Exception, Feeds], Exception]
    ) -> None:
        self._state, self._failed = state, failed
        self._inputs = SingleTokens(state.component, feeds, calls, native_value)
        sizes = {"batch": state._batch, **_ONE}
        self._results = {
            spec.name: torch.empty(_shape(spec, sizes), dtype=getattr(torch, spec.dtype)) for spec in state._results
        }
        self._logits: np.ndarray = self._results["logits"][:, -1].numpy()
        self._binding: Any = None
        self._last: np.ndarray | None = None

    @staticmethod
    def fits(state: OrtState, feeds: Feeds, calls: int) -> bool:
        """Whether the state can go on so."""
        return (
            state._where == HOST
            and bool(state._in_place)
            and not state._replaced
            and state._front is None
            and all(isinstance(axis, int) or axis in ("batch", *_ONE) for spec in state._results for axis in spec.shape)
            and SingleTokens.fits(state.component, feeds, calls, state._length)
        )

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits `(batch, vocabulary)` behind each row's next token."""
        state, inputs = self._state, self._inputs
        total = state._length + 1
        mask = inputs.write(tokens)
        binding = state._reserve(total)
        if binding is not self._binding:
            # A new one, with the buffers alone: at first, and when they have grown.
            for name, tensor in inputs.feeds.items():
                binding.read(name, tensor)
            if state._lengths:
                binding.read(LENGTHS, state._last)
                self._last = state._last.numpy()
            for name, result in self._results.items():
                binding.write(name, result)
            self._binding = binding
        if self._last is not None:
            self._last.fill(total - 1)
        if mask is not None and inputs.mask_name is not None:
            binding.read_native(inputs.mask_name, mask)
        try:
            binding.run()
        except (*RUN_ERRORS, RuntimeError) as error:
            raise self._failed(error, inputs.feeds) from error
        state._length = total
        return self._logits


def _shape(spec: TensorSpec, sizes: Mapping[str, int]) -> list[int]:
    return [axis if isinstance(axis, int) else sizes[axis or ""] for axis in spec.shape]
