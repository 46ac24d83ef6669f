"""An ONNX Runtime session whose inputs and outputs are torch tensors on a GPU, bound by their addresses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence

import onnxruntime as ort
import torch

from accel.artifact import Component
from accel.interfaces.protocols import Feeds
from accel.interfaces.session_contract import no_state
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import State

from .nvidia import on_gpu
from .session import OrtSession
from .state import OrtState
from .values import ort_value_as_tensor


class DeviceSession(OrtSession):
    """Runs a graph on one GPU. Thread-safe: ONNX Runtime's `run` is.

    ONNX Runtime computes on a stream of its own, so a call waits for torch's current stream before it and for ONNX
    Runtime after it.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        component: Component,
        device: DeviceSpec,
        compute_dtype: str,
        shapes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(session, component, device, compute_dtype, shapes)
        self._plain = False
        self._where = torch.device(device.type, device.index)

    def _run_unusual(
        self,
        feeds: Feeds,
        outputs: Sequence[str] | None,
        out: Mapping[str, torch.Tensor] | None,
        state: State | None,
    ) -> dict[str, torch.Tensor]:
        with on_gpu(self._where.index):
            return super()._run_unusual(feeds, outputs, out, state)

    def _run_bound(
        self, session: ort.InferenceSession, tensors: Feeds, names: list[str], out: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        binding = self._bound(session, tensors, names, out)
        torch.cuda.current_stream(self._where).synchronize()
        session.run_with_iobinding(binding)
        values = dict(zip(names, binding.get_outputs(), strict=True))
        # ONNX Runtime may use its memory again as soon as the value is gone: the caller gets a copy.
        return {name: out[name] if name in out else ort_value_as_tensor(values[name]).clone() for name in names}

    def _checked(self, feeds: Feeds, dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, torch.Tensor]:
        """As of any session; the values of ids on the GPU are looked at, as the call waits for them anyway."""
        tensors = super()._checked(feeds, dtypes)
        self._check_values.waiting(tensors)
        return tensors

    def new_state(self, batch: int) -> State:
        """An empty cache in the GPU's memory.

        Raises:
            SessionError: The graph has none.
        """
        if not self._component.stateful:
            raise no_state()
        return OrtState(self, self._component, batch, self._where)

    def close(self) -> None:
        """Give ONNX Runtime's memory back."""
        with on_gpu(self._where.index):
            super().close()

    def __del__(self) -> None:
        # A forked process has no GPU.
        with contextlib.suppress(AttributeError, RuntimeError):
            if not sys.is_finalizing():
                self.close()
