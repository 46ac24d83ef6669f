"""Private names of PyTorch, as functions of ours; for those of its compiler see `inductor`.

Seen in torch 2.11 to 2.13; tests/backends/test_cuda_upstream.py calls each of them where there is a GPU.

| name | reason | public alternative |
|---|---|---|
| `torch._C._cuda_clearCublasWorkspaces` | PyTorch's own compiler calls it around its CUDA graphs (pytorch/pytorch#193402) | none |
| `torch._C._cuda_getCurrentRawStream` | the stream's object takes 7 microseconds | `torch.cuda.current_stream().cuda_stream` |
"""

from __future__ import annotations

import torch


def clear_cublas_workspaces() -> None:
    """Release the scratch memory that PyTorch keeps for cuBLAS by stream."""
    torch._C._cuda_clearCublasWorkspaces()


def current_stream_number(index: int) -> int:
    """The number of torch's current stream on a GPU."""
    number: int = torch._C._cuda_getCurrentRawStream(index)
    return number
