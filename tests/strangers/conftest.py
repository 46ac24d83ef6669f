"""The folders of other tools, unpacked once."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from .folders import ARCHIVE, FOREIGN


@pytest.fixture(scope="session")
def folders(shared: Callable[..., Path]) -> Path:
    """All of them, with the answers of the tools."""

    def unpack(out: Path) -> None:
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(out, filter="data")
        with tarfile.open(FOREIGN / "folders.tar.xz") as archive:
            archive.extractall(
                out, [one for one in archive.getmembers() if one.name.startswith("genai/")], filter="data"
            )

    return shared("strangers", unpack)
