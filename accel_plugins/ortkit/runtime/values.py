"""Torch tensors and ONNX Runtime's values over the same memory."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as ort_native
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

VERSION = tuple(int(part) for part in ort.__version__.split(".")[:2])
"""Of ONNX Runtime: major and minor."""
RUN_ERRORS = (
    ort_native.InvalidArgument,
    ort_native.Fail,
    ort_native.RuntimeException,
    ort_native.NotImplemented,
    ort_native.EPFail,
)
"""What ONNX Runtime raises when a run fails; with IO binding a plain `RuntimeError`, too."""
_BOOLS_ARE_BYTES = VERSION < (1, 32)
"""Whether DLPack's tensors of bytes are said to be booleans; from 1.32 on DLPack's own booleans are."""


def as_ort_value(tensor: torch.Tensor) -> Any:
    """The memory of a torch tensor of any shape as an `OrtValue`; it must outlive the value."""
    return ort.OrtValue(native_value(tensor))


def ort_value_as_tensor(value: Any) -> torch.Tensor:
    """An `OrtValue`'s memory as a torch tensor of its shape, on its device."""
    return native_as_tensor(value._ortvalue)


def native_as_tensor(value: Any) -> torch.Tensor:
    """The same of what `OrtValue` wraps."""
    tensor: torch.Tensor = from_dlpack(value.to_dlpack())
    return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor


def native_value(tensor: torch.Tensor) -> Any:
    """What `OrtValue` wraps, over the memory of a torch tensor."""
    if not _BOOLS_ARE_BYTES:
        return ort_native.OrtValue.from_dlpack(to_dlpack(tensor))
    is_bool = tensor.dtype is torch.bool
    return ort_native.OrtValue.from_dlpack(to_dlpack(tensor.view(torch.uint8) if is_bool else tensor), is_bool)


class Binding:
    """What a graph reads and writes, as tensors, bound by their addresses and kept from run to run.

    ONNX Runtime's own class in Python looks each time whether another provider has captured a graph: half of what a step of
    a small decoder costs. This one talks to what is below it.

    Args:
        session: Whose graph.
        where: The device that outputs without a tensor are made on.
    """

    def __init__(self, session: ort.InferenceSession, where: torch.device) -> None:
        self._run = session._sess.run_with_iobinding
        self._native: Any = ort_native.SessionIOBinding(session._sess)
        self._where = ort.OrtDevice.make(where.type, where.index or 0)._get_c_device()
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
