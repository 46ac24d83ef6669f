"""Sessions of decoders on an NVIDIA GPU: the KV cache stays in GPU memory, and a decoding step is one CUDA graph."""

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
    """Session that runs a decoder with KV caches in GPU memory.

    The first call with a state, and each call with several tokens, copies the attention mask to CPU memory and waits
    for the copy. A call with one token for each row does not wait. The second call with one token for each row captures
    a CUDA graph, and later calls replay the graph.

    Args:
        runtime: The runtime of the decoder on its GPU.
        device: The GPU.
        compute_dtype: The data type of the computation.
    """

    def __init__(self, runtime: DecoderRuntime, device: DeviceSpec, compute_dtype: str) -> None:
        super().__init__(runtime, device, compute_dtype)
        self.check_values = self._check_values
        self.slots = Slots(self._late)

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Run the decoder; see `accel.interfaces.protocols.Session.run`.

        The state contains the cache tensors; callers pass the other inputs.

        Raises:
            InputError: The state is missing or belongs to another session, or the mask does not continue the earlier
                masks.
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
        """Return a context manager that makes the session's GPU torch's current device."""
        if torch.cuda.current_device() == self._index:
            return nullcontext()
        return torch.cuda.device(self._where)

    def new_state(self, batch: int) -> State:
        """Return an empty KV cache for this number of rows. Its memory is allocated at the first call."""
        return CudaState(self, self._component, batch)

    def close(self) -> None:
        """Release ONNX Runtime's memory and the memory of all KV caches."""
        super().close()
        with on_gpu(self._where.index):
            self.slots.clear()

    def __del__(self) -> None:
        # Suppress errors in a forked process, because the GPU is not available in a forked process.
        with contextlib.suppress(AttributeError, RuntimeError):
            if not sys.is_finalizing():
                self.close()
