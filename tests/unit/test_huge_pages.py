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


@pytest.mark.skipif(huge_pages._collapse_function() is None, reason="this system has no huge pages")
def test_new_memory_moves_to_huge_pages() -> None:
    before = _bytes_in_huge_pages()
    with huge_pages.weights_in_huge_pages():
        values = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)
        total = int(values.sum())
    _wait_for_thread()
    assert int(values.sum()) == total
    if _bytes_in_huge_pages() == before:
        pytest.skip("this kernel does not move memory to huge pages on request")
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
