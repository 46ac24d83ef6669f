"""Release memory of weights that are mapped from a file, such as safetensors weights, after the weights were read."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

_PAGEMAP = Path("/proc/self/pagemap")
# Bits of an entry in Linux' pagemap file. A present page without the file bit is private memory, not a page of a file.
_OF_A_FILE = np.uint64(1 << 61)
_SWAPPED = np.uint64(1 << 62)
_PRESENT = np.uint64(1 << 63)
_ENTRY_BYTES = 8


def release_pages(tensors: Iterable[torch.Tensor | np.ndarray]) -> None:
    """Release the memory pages of tensors that are mapped from a file. A later read of a tensor loads its pages from the file again.

    Tensors that are not mapped from a file are not changed. A tensor with a modified page keeps all of its pages, because the file does
    not contain the modification. No other thread may write to the tensors during the call. The function does nothing on systems other
    than Linux.
    """
    give_back = _give_back()
    if give_back is None:
        return
    for tensor in tensors:
        begin, end = _span(tensor)
        first = begin // mmap.PAGESIZE
        count = -(-end // mmap.PAGESIZE) - first
        if begin < end and _unchanged(first, count):
            give_back(first * mmap.PAGESIZE, count * mmap.PAGESIZE, mmap.MADV_DONTNEED)


def _span(tensor: torch.Tensor | np.ndarray) -> tuple[int, int]:
    """Return the start address and the end address (exclusive) of a tensor in host memory.

    The two addresses are equal if the tensor is not in host memory.
    """
    if isinstance(tensor, np.ndarray):
        return np.lib.array_utils.byte_bounds(tensor)
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return 0, 0
    try:
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
    # Tensor subclasses that consist of several tensors have no single storage, and raise one of these errors.
    except (NotImplementedError, RuntimeError):
        return 0, 0
    return begin, begin + storage.nbytes() if begin else 0


def _unchanged(first: int, count: int) -> bool:
    """Return whether no page of the range is private or swapped, so that all pages in memory have the content of the file."""
    try:
        with _PAGEMAP.open("rb", buffering=0) as file:
            file.seek(first * _ENTRY_BYTES)
            pages = np.frombuffer(file.read(count * _ENTRY_BYTES), dtype=np.uint64)
    except OSError:
        return False
    if len(pages) != count:
        return False
    private = (pages & _PRESENT != 0) & (pages & _OF_A_FILE == 0)
    return not bool((private | (pages & _SWAPPED != 0)).any())


@functools.cache
def _give_back() -> Callable[[int, int, int], int] | None:
    """Return the C library's function `madvise` on Linux, else `None`. MADV_DONTNEED has another meaning on other systems."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function: Callable[[int, int, int], int] = advise
    return function
