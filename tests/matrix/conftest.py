"""The matrix makes each stage of its chains once a run."""

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
    """What makes the artifacts of cases."""
    return Chains(shared, tiny_folder, tiny_artifact, generator)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """PyTorch has one pool of threads for the whole process, which a case may make smaller."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
