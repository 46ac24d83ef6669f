"""CUDA graphs of PyTorch calls: capture and synchronization."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from .upstream import clear_cublas_workspaces, current_stream_number

Result = TypeVar("Result")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that makes a GPU the current device of this thread. For a CPU, it does nothing.

    PyTorch operations run on the device of their tensors and do not need this context. Triton kernels, CUDA events,
    graph captures and PyTorch's compiler use the current device.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def captured(
    call: Callable[[], Result], device: torch.device, *, warm_up: int = 3
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture a call as a CUDA graph. Return the graph and the result tensors, which each replay overwrites.

    The call first runs on a side stream, as PyTorch's documentation of CUDA graphs requires. Each graph gets a separate
    cuBLAS workspace. Without this, all graphs of a stream would share one workspace. PyTorch frees the shared workspace
    when the first graph is deleted or when `torch.compile` records a graph, although other graphs still write to it
    (pytorch/pytorch#193402).

    Args:
        call: The function to capture. Each call must use the same sizes and the same memory.
        device: The GPU that the function runs on.
        warm_up: Number of calls before the captured call.
    """
    with on_device(device):
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(warm_up):
                call()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        clear_cublas_workspaces()
        try:
            # With "thread_local", other threads may allocate GPU memory during the capture. The stream is passed
            # because PyTorch's default capture stream belongs to the GPU of the first capture in this process.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                result = call()
        finally:
            clear_cublas_workspaces()
    return graph, result


class StreamOrder:
    """Synchronization of calls on different CUDA streams that use the same GPU memory. Only one thread at a time may
    use an instance.

    Args:
        device: The GPU. For a CPU, `take` does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._handle = 0

    def take(self) -> None:
        """Make the current stream wait for the stream of the previous call."""
        if self._device.type != "cuda":
            return
        handle = current_stream_number(self._index)
        if self._last is not None and handle == self._handle:
            return
        current = torch.cuda.current_stream(self._device)
        if self._last is not None:
            current.wait_stream(self._last)
        self._last, self._handle = current, handle

    @functools.cached_property
    def _index(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index
