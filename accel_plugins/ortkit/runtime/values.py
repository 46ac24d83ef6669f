"""Torch tensors and ONNX Runtime's values over the same memory."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort
import torch

from ..upstream import native_binding, native_device, native_value


def as_ort_value(tensor: torch.Tensor) -> Any:
    """The memory of a torch tensor of any shape as an `OrtValue`; it must outlive the value."""
    return ort.OrtValue(native_value(tensor))


class Binding:
    """What a graph reads and writes, as tensors, bound by their addresses and kept from run to run.

    Args:
        session: Whose graph.
        where: The device that outputs without a tensor are made on.
    """

    def __init__(self, session: ort.InferenceSession, where: torch.device) -> None:
        self._native, self._run = native_binding(session)
        self._where = native_device(where)
        # The host's memory is read at each run: the same tensor need not be bound again. For a device it may be copied when it
        # is bound.
        self._stays = where.type == "cpu"
        self._read: dict[str, tuple[torch.Tensor, int, torch.Size]] = {}
        self._written: list[str] = []

    def read(self, name: str, tensor: torch.Tensor) -> None:
        """Read an input from a contiguous tensor of its type, where the graph runs."""
        address, shape = tensor.data_ptr(), tensor.shape
        before = self._read.get(name)
        if before is not None and self._stays and before[0] is tensor and before[1] == address and before[2] == shape:
            return
        self._native.bind_ortvalue_input(name, native_value(tensor))
        self._read[name] = (tensor, address, shape)

    def read_native(self, name: str, value: Any) -> None:
        """Read an input from what `native_value` made of such a tensor, which must outlive the runs."""
        self._native.bind_ortvalue_input(name, value)
        self._read.pop(name, None)

    def write(self, name: str, tensor: torch.Tensor | None = None) -> None:
        """Write an output to a contiguous tensor of its type and size, or to memory that ONNX Runtime makes for it."""
        if tensor is not None:
            self._native.bind_ortvalue_output(name, native_value(tensor))
        else:
            self._native.bind_output(name, self._where)
        if name not in self._written:
            self._written.append(name)

    def run(self) -> None:
        """Compute all outputs that are bound."""
        self._run(self._native, None)

    def made(self) -> dict[str, Any]:
        """All outputs of the last run, as ONNX Runtime's values (`native_as_tensor`)."""
        return dict(zip(self._written, self._native.get_outputs(), strict=True))
