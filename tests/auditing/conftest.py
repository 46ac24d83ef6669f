"""Fixtures of the tests of audits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.auditing.servers import save_embedder


@pytest.fixture(scope="session")
def embedder(shared: Callable[..., Path]) -> Path:
    """Return the folder of the tiny embedding model."""
    return shared("audited-embedder", save_embedder)


@pytest.fixture(scope="session")
def stale(shared: Callable[..., Path]) -> Path:
    """Return the folder of another revision of the embedding model."""
    return shared("stale-embedder", lambda folder: save_embedder(folder, seed=1))
