"""Functions that wrap private names of PyTorch.

The names exist in torch 2.11 to 2.13; tests/backends/test_cuda_upstream.py calls each function on machines with a GPU.

| name | reason | public alternative |
|---|---|---|
| `torch._C._cuda_getDevice` | the public function first initializes CUDA | `torch.cuda.current_device` |
| `torch._C._cuda_getCurrentRawStream` | creating the stream object takes 3.5 microseconds | `torch.cuda.current_stream` |
"""

from __future__ import annotations

import torch


def current_device() -> int:
    """Return the index of torch's current GPU; CUDA must be initialized."""
    index: int = torch._C._cuda_getDevice()
    return index


def current_stream_number(index: int) -> int:
    """Return the handle of torch's current stream on a GPU, as a number."""
    number: int = torch._C._cuda_getCurrentRawStream(index)
    return number
