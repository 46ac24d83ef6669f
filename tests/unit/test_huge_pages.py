"""Huge pages for the weights of large ONNX Runtime sessions."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest

from accel_plugins.ortkit.runtime import huge_pages


def _wait_for_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "accel-huge-pages":
            thread.join(60)


def _bytes_in_huge_pages() -> int:
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return int(re.search(r"AnonHugePages:\s+(\d+) kB", text)[1]) << 10  # type: ignore[index]


def _kernel_moves_memory() -> bool:
    """Return whether the kernel moves a page on request."""
    collapse = huge_pages._collapse_function()
    if collapse is None:
        return False
    values = np.ones(8 << 20, np.uint8)
    address = -(-values.ctypes.data // huge_pages._HUGE_PAGE_BYTES) * huge_pages._HUGE_PAGE_BYTES
    return collapse(address, huge_pages._HUGE_PAGE_BYTES, huge_pages._COLLAPSE) == 0


@pytest.mark.skipif(not _kernel_moves_memory(), reason="this system does not move memory to huge pages on request")
def test_new_memory_moves_to_huge_pages() -> None:
    before = _bytes_in_huge_pages()
    with huge_pages.weights_in_huge_pages():
        values = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)
        total = int(values.sum())
    _wait_for_thread()
    assert int(values.sum()) == total
    assert _bytes_in_huge_pages() - before >= 48 << 20


def test_nothing_happens_without_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(huge_pages, "_SETTING", setting)
    huge_pages._collapse_function.cache_clear()
    try:
        with huge_pages.weights_in_huge_pages():
            pass
        assert not any(thread.name == "accel-huge-pages" for thread in threading.enumerate())
    finally:
        huge_pages._collapse_function.cache_clear()
