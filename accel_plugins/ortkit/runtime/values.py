"""Torch tensors and ONNX Runtime's values over the same memory."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as ort_native


def as_ort_value(tensor: torch.Tensor) -> Any:
    """The memory of a torch tensor of any shape as an `OrtValue`; it must outlive the value."""
    is_bool = tensor.dtype is torch.bool
    capsule = torch.utils.dlpack.to_dlpack(tensor.view(torch.uint8) if is_bool else tensor)  # type: ignore[attr-defined]
    return ort.OrtValue(ort_native.OrtValue.from_dlpack(capsule, is_bool))


def ort_value_as_tensor(value: Any) -> torch.Tensor:
    """An `OrtValue`'s memory as a torch tensor of its shape, on its device."""
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack())
    return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor
