"""Weights that are mapped from a file, as those of safetensors are: what is read of them stays resident only as long as it is used."""

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
# Bits of an entry there; a page that is present and private to the process is none of a file or of shared memory.
_OF_A_FILE = np.uint64(1 << 61)
_SWAPPED = np.uint64(1 << 62)
_PRESENT = np.uint64(1 << 63)
_ENTRY_BYTES = 8


def release_pages(tensors: Iterable[torch.Tensor | np.ndarray]) -> None:
    """Give back the resident pages of tensors that are mapped from a file and were not written to; a read brings them again.

    Tensors in memory of their own stay as they are, and so does a tensor of which any page was changed: only what the file holds can
    come back from it. Nothing may write to the tensors meanwhile. Does nothing on systems other than Linux.
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
    """The first address of a tensor's memory on the host, and the one after its last; the same for none."""
    if isinstance(tensor, np.ndarray):
        steps = [(size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True)]
        begin = tensor.__array_interface__["data"][0]
        found = begin + sum(min(step, 0) for step in steps), begin + sum(max(step, 0) for step in steps)
        return (found[0], found[1] + tensor.itemsize) if tensor.size else (begin, begin)
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return 0, 0
    try:
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
    # Tensors of other kinds, which are made of several.
    except (NotImplementedError, RuntimeError):
        return 0, 0
    return begin, begin + storage.nbytes() if begin else 0


def _unchanged(first: int, count: int) -> bool:
    """Whether all pages that are resident are the file's."""
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
    """The system's `madvise`, where it means what it means on Linux."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found: Callable[[int, int, int], int] = advise
    return found
