"""Decoders on an NVIDIA GPU: the cache stays there, a step is one CUDA graph."""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager, nullcontext

import torch

from accel.interfaces.protocols import Feeds, Names
from accel.interfaces.session import BaseSession
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import State

from ..ortkit.runtime.nvidia import on_gpu
from .runtime import DecoderRuntime
from .session import CudaSession
from .slots import Slots
from .state import CudaState


class CudaDecoderSession(CudaSession[DecoderRuntime]):
    """Runs a decoder over caches that stay on the GPU.

    The first call of a state, and any that brings several tokens, reads the attention mask on the host. A call that brings
    one token for each row waits for nothing; from the second on it replays a CUDA graph.

    Args:
        runtime: The decoder on its GPU.
        device: That GPU.
        compute_dtype: What its kernels compute in.
    """

    def __init__(self, runtime: DecoderRuntime, device: DeviceSpec, compute_dtype: str) -> None:
        super().__init__(runtime, device, compute_dtype)
        self.check_values = self._check_values
        self.slots = Slots(self._late)

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """See `accel.interfaces.protocols.Session.run`. The cache's tensors are the state's; the caller gives and gets the rest.

        Raises:
            InputError: No state, another session's, or a mask that does not continue the state's.
        """
        return BaseSession.run(self, feeds, outputs=outputs, out=out, state=state)

    def _compute(
        self, tensors: dict[str, torch.Tensor], names: Names, out: Feeds, state: State | None
    ) -> dict[str, torch.Tensor]:
        assert isinstance(state, CudaState)
        if self._late is not None:
            self._late.report()
        with self.runtime.lock, self.on_device():
            logits = state.run(tensors)
        return {"logits": logits} if "logits" in names else {}

    def on_device(self) -> AbstractContextManager[object]:
        """The GPU as torch's current one."""
        if torch.cuda.current_device() == self._index:
            return nullcontext()
        return torch.cuda.device(self._where)

    def new_state(self, batch: int) -> State:
        """An empty cache. Memory is taken at the first call."""
        return CudaState(self, self._component, batch)

    def close(self) -> None:
        """Give ONNX Runtime's memory and that of all caches back."""
        super().close()
        with on_gpu(self._where.index):
            self.slots.clear()

    def __del__(self) -> None:
        # A forked process has no GPU.
        with contextlib.suppress(AttributeError, RuntimeError):
            if not sys.is_finalizing():
                self.close()
