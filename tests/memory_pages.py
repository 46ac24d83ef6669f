"""A function that counts which memory pages of a tensor are in RAM."""

from __future__ import annotations

import mmap

import numpy as np
import torch

from accel.capture.mapped_memory_release import _PAGEMAP, _PRESENT, _span

TELLS = _PAGEMAP.exists()
"""Whether the operating system reports which memory pages of a process are in RAM."""


def resident(tensor: torch.Tensor) -> int:
    """Return the number of memory pages of a tensor that are in RAM. The first page and the last page are not counted,
    because they may contain other data.
    """
    begin, end = _span(tensor)
    first, last = begin // mmap.PAGESIZE + 1, end // mmap.PAGESIZE - 1
    with _PAGEMAP.open("rb", buffering=0) as file:
        file.seek(first * 8)
        return int((np.frombuffer(file.read((last - first) * 8), dtype=np.uint64) & _PRESENT != 0).sum())
