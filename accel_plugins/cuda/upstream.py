"""Private names of PyTorch, as functions of ours.

Seen in torch 2.11 to 2.13; tests/backends/test_cuda_upstream.py calls each of them where there is a GPU.

| name | reason | public alternative |
|---|---|---|
| `torch._C._cuda_getDevice` | the public one initialises CUDA first | `torch.cuda.current_device` |
| `torch._C._cuda_getCurrentRawStream` | the stream's object costs 3.5 microseconds | `torch.cuda.current_stream` |
"""

from __future__ import annotations

import torch


def current_device() -> int:
    """Index of torch's current GPU; CUDA is initialised."""
    index: int = torch._C._cuda_getDevice()
    return index


def current_stream_number(index: int) -> int:
    """The number of torch's current stream on a GPU."""
    number: int = torch._C._cuda_getCurrentRawStream(index)
    return number
