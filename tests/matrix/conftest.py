"""Fixtures of the matrix tests. Each stage of a chain runs only once in a test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from chain import Chains

from accel.artifact import Artifact


@pytest.fixture(scope="session")
def chains(
    shared: Callable[..., Path],
    tiny_folder: Callable[..., Path],
    tiny_artifact: Callable[..., Artifact],
    generator: Callable[..., Artifact],
) -> Chains:
    """Cache that makes the artifacts of cases."""
    return Chains(shared, tiny_folder, tiny_artifact, generator)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Restore PyTorch's number of threads, which belongs to the whole process and which a case may change."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
