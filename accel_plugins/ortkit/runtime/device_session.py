"""ONNX Runtime session whose inputs and outputs are torch tensors on a GPU, passed by address without a copy."""

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
    """Session that runs a graph on one GPU. Thread-safe, because ONNX Runtime's `run` is thread-safe.

    ONNX Runtime computes on its own CUDA stream. A call first waits for the work on torch's current stream, then runs
    the graph and waits until the graph has finished.
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
        self._numpy_only = False
        self._where = torch.device(device.type, device.index)

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Run the graph on the GPU; see `accel.interfaces.protocols.Session.run`."""
        with on_gpu(self._where.index):
            return super().run(feeds, outputs=outputs, out=out, state=state)

    def _result(self, value: ort.OrtValue) -> torch.Tensor:
        # Return a copy, because ONNX Runtime may reuse the memory of an output after `value` is deleted.
        return ort_value_as_tensor(value).clone()

    def _read(self, feeds: Feeds, state: State | None = None) -> dict[str, torch.Tensor]:
        """Check and convert the inputs, including token ids on the GPU.

        The check of ids on the GPU must wait for the GPU, but a call waits for the GPU in any case.
        """
        tensors = super()._read(feeds, state)
        self._check_values.waiting(tensors)
        return tensors

    def close(self) -> None:
        """Release ONNX Runtime's memory."""
        with on_gpu(self._where.index):
            super().close()

    def __del__(self) -> None:
        # Suppress errors in a forked process, where the GPU is not available.
        with contextlib.suppress(AttributeError, RuntimeError):
            if not sys.is_finalizing():
                self.close()
