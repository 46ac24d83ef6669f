"""An ONNX Runtime session whose inputs and outputs are torch tensors on a GPU, bound by their addresses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping

import onnxruntime as ort
import torch

from accel.artifact import Component
from accel.interfaces.protocols import Feeds, Names
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import State

from ..upstream import ort_value_as_tensor
from .nvidia import on_gpu
from .session import OrtSession


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

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """See `accel.interfaces.protocols.Session.run`."""
        with on_gpu(self._where.index):
            return super().run(feeds, outputs=outputs, out=out, state=state)

    def _result(self, value: ort.OrtValue) -> torch.Tensor:
        # ONNX Runtime may use its memory again as soon as the value is gone: the caller gets a copy.
        return ort_value_as_tensor(value).clone()

    def _read(self, feeds: Feeds, state: State | None = None) -> dict[str, torch.Tensor]:
        """As of any session; the values of ids on the GPU are checked, as the call waits for them anyway."""
        tensors = super()._read(feeds, state)
        self._check_values.waiting(tensors)
        return tensors

    def close(self) -> None:
        """Give ONNX Runtime's memory back."""
        with on_gpu(self._where.index):
            super().close()

    def __del__(self) -> None:
        # A forked process has no GPU.
        with contextlib.suppress(AttributeError, RuntimeError):
            if not sys.is_finalizing():
                self.close()
