"""Fixtures that several integration test modules share."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

PACKED = Path(__file__).parents[1] / "fixtures" / "foreign" / "folders.tar.xz"


@pytest.fixture(scope="session")
def folders(shared: Callable[..., Path]) -> Path:
    """Return the folder that contains the unpacked model folders of other tools."""

    def unpack(out: Path) -> None:
        with tarfile.open(PACKED) as archive:
            archive.extractall(out, filter="data")

    return shared("foreign", unpack)
