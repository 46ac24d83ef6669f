"""Weights on the GPU once, for all ONNX Runtime sessions that run forms of one graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ..ortkit.graph.editing import read_graph
from ..ortkit.runtime.values import as_ort_value

# What ONNX Runtime may want on the host (shapes, axes, scalars) is small and mostly integer.
_LEAST_BYTES = 1 << 16
_KINDS: Mapping[ir.DataType | None, torch.dtype] = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
}


class SharedWeights:
    """The large floating-point weights of a graph, put on the GPU when they are first asked for.

    Must outlive the sessions that use them.

    Args:
        path: The graph file.
        device: The GPU.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path = path
        self._device = device
        self._values: dict[str, Any] | None = None
        self._tensors: list[torch.Tensor] = []

    def values(self) -> Mapping[str, Any]:
        """ONNX Runtime's values over them, by the names of the initializers; complete when this returns."""
        if self._values is None:
            self._values = {}
            for name, value in read_graph(self._path).graph.initializers.items():
                dtype = _KINDS.get(value.dtype)
                if dtype is None or value.const_value is None or value.const_value.nbytes < _LEAST_BYTES:
                    continue
                # torch reads no bfloat16 from NumPy, so the bits travel.
                bits = np.ascontiguousarray(value.const_value.numpy()).view(f"u{dtype.itemsize}")
                tensor = torch.from_numpy(bits.copy()).to(self._device).view(dtype)
                self._tensors.append(tensor)
                self._values[name] = as_ort_value(tensor)
            torch.cuda.current_stream(self._device).synchronize()
        return self._values
