"""Which pages of a tensor's memory are resident."""

from __future__ import annotations

import mmap

import numpy as np
import torch

from accel.capture.mapped_memory import _PAGEMAP, _PRESENT, _span

TELLS = _PAGEMAP.exists()
"""Whether the system tells which pages are resident."""


def resident(tensor: torch.Tensor) -> int:
    """Pages of a tensor's inner part that are resident; those at its ends may hold others, too."""
    begin, end = _span(tensor)
    first, last = begin // mmap.PAGESIZE + 1, end // mmap.PAGESIZE - 1
    with _PAGEMAP.open("rb", buffering=0) as file:
        file.seek(first * 8)
        return int((np.frombuffer(file.read((last - first) * 8), dtype=np.uint64) & _PRESENT != 0).sum())
