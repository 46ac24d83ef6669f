"""Torch tensors and ONNX Runtime values that share memory."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort
import torch

from ..upstream import native_binding, native_device, native_value


def as_ort_value(tensor: torch.Tensor) -> Any:
    """Return an `OrtValue` that shares memory with a torch tensor; the tensor must outlive the value."""
    return ort.OrtValue(native_value(tensor))


class ReusedBinding:
    """IO binding of a graph's inputs and outputs to the memory of tensors, reused from run to run.

    Args:
        session: ONNX Runtime's session for the graph.
        where: The device for outputs that are not bound to a tensor.
    """

    def __init__(self, session: ort.InferenceSession, where: torch.device) -> None:
        self._native, self._run = native_binding(session)
        self._where = native_device(where)
        # On the CPU, ONNX Runtime reads the tensor's memory at each run, so `read` does not bind the same tensor again.
        # On other devices, ONNX Runtime may copy a tensor when it is bound.
        self._stays = where.type == "cpu"
        self._read: dict[str, tuple[torch.Tensor, int, torch.Size]] = {}
        self._written: list[str] = []

    def read(self, name: str, tensor: torch.Tensor) -> None:
        """Bind an input to a contiguous tensor of the input's data type, on the device where the graph runs."""
        address, shape = tensor.data_ptr(), tensor.shape
        bound = self._read.get(name)
        if bound is not None and self._stays and bound[0] is tensor and bound[1] == address and bound[2] == shape:
            return
        self._native.bind_ortvalue_input(name, native_value(tensor))
        self._read[name] = (tensor, address, shape)

    def read_native(self, name: str, value: Any) -> None:
        """Bind an input to a value from `native_value`; the value's tensor must exist until the last run."""
        self._native.bind_ortvalue_input(name, value)
        self._read.pop(name, None)

    def write(self, name: str, tensor: torch.Tensor | None = None) -> None:
        """Bind an output to a contiguous tensor with the output's data type and size; without a tensor, ONNX Runtime allocates."""
        if tensor is not None:
            self._native.bind_ortvalue_output(name, native_value(tensor))
        else:
            self._native.bind_output(name, self._where)
        if name not in self._written:
            self._written.append(name)

    def run(self) -> None:
        """Compute all bound outputs."""
        self._run(self._native, None)

    def results(self) -> dict[str, Any]:
        """Return all outputs of the last run by name, as ONNX Runtime's native values (see `native_as_tensor`)."""
        return dict(zip(self._written, self._native.get_outputs(), strict=True))
