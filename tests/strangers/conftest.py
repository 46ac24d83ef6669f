"""Fixtures of the stored folders that other tools wrote. The archives are unpacked once in a test run."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from .folders import ARCHIVE, FOREIGN


@pytest.fixture(scope="session")
def folders(shared: Callable[..., Path]) -> Path:
    """Return a folder with all stored folders, and with the outputs that the tools computed."""

    def unpack(out: Path) -> None:
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(out, filter="data")
        with tarfile.open(FOREIGN / "folders.tar.xz") as archive:
            archive.extractall(
                out, [member for member in archive.getmembers() if member.name.startswith("genai/")], filter="data"
            )

    return shared("strangers", unpack)
