"""CUDA graphs of PyTorch's calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from .upstream import clear_cublas_workspaces, current_stream_number

Result = TypeVar("Result")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current device of this thread; does nothing for a CPU.

    PyTorch's own operations go to the device of their tensors. Triton's launches, events, captures and PyTorch's compiler go to the
    current device.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def captured(
    call: Callable[[], Result], device: torch.device, *, warm_up: int = 3
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A call as a graph, and what each replay writes its answer to.

    It warms up on a side stream, as PyTorch's documentation of CUDA graphs asks for. The scratch memory of cuBLAS is the
    graph's own: PyTorch keeps it by stream, for later graphs as well, and gives it back with the first of them that goes, or
    when `torch.compile` records one, while others still write to it (pytorch/pytorch#193402).

    Args:
        call: The same each time: no sizes that change, no memory but what stays.
        device: The GPU that it runs on.
        warm_up: Calls before the captured one.
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
            # Other threads may allocate meanwhile.
            # On this device's stream: the default capture stream belongs to the device on which the process captured first.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                result = call()
        finally:
            clear_cublas_workspaces()
    return graph, result


class Turns:
    """Calls that use the same memory of a GPU, one after another, on whatever streams they come. Not for several threads at once.

    Args:
        device: The GPU; on a CPU nothing is to be ordered.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._handle = 0

    def take(self) -> None:
        """Order the current stream behind the one of the call before."""
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
