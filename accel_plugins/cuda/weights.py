"""Weights on the GPU that all ONNX Runtime sessions of one graph's forms share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ..ortkit.graph.editing import read_graph
from ..ortkit.runtime.values import as_ort_value

# Smaller values are not shared: ONNX Runtime may need them on the CPU (shapes, axes, scalars).
_LEAST_BYTES = 1 << 16
_KINDS: Mapping[ir.DataType | None, torch.dtype] = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
}


class SharedWeights:
    """The large floating-point weights of a graph, copied to the GPU when they are first requested.

    The object must outlive the sessions that use its weights.

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
        """Return ONNX Runtime's values of the weights by initializer name; the copy to the GPU is finished."""
        if self._values is None:
            self._values = {}
            for name, value in read_graph(self._path).graph.initializers.items():
                dtype = _KINDS.get(value.dtype)
                if dtype is None or value.const_value is None or value.const_value.nbytes < _LEAST_BYTES:
                    continue
                # torch cannot read bfloat16 from NumPy, so the bits are copied as unsigned integers.
                bits = np.ascontiguousarray(value.const_value.numpy()).view(f"u{dtype.itemsize}")
                tensor = torch.from_numpy(bits.copy()).to(self._device).view(dtype)
                self._tensors.append(tensor)
                self._values[name] = as_ort_value(tensor)
            torch.cuda.current_stream(self._device).synchronize()
        return self._values
