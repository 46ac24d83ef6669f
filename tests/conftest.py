"""Tests run offline, with a home of their own, and export each tiny model once a session."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# `datasets` reads this when it is imported; files that tests read leave nothing in the user's cache.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="accel-tests-datasets-")

from accel.artifact import Artifact
from accel.stages.export import export
from accel.testing.models import save_tiny

atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` are skipped, with every reason, where the CUDA backend cannot run."""
    if item.get_closest_marker("gpu") is None:
        return
    from accel.backends import registry

    found = registry.probe(registry.describe("cuda"))
    if not found.available:
        pytest.skip(f"no GPU: {'; '.join(reason.message for reason in found.reasons)}")


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["ACCEL_HOME"] = str(tmp_path_factory.mktemp("accel-home"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Transformers folders of tiny models, made when first asked for."""
    root = tmp_path_factory.mktemp("tiny")
    made: dict[tuple[str, str], Path] = {}

    def get(family: str = "bert", task: str = "text-classification") -> Path:
        if (family, task) not in made:
            made[family, task] = save_tiny(root / f"{family}-{task}", family, task)
        return made[family, task]

    return get


@pytest.fixture(scope="session")
def tiny_artifact(
    tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Artifact]:
    """Their ONNX exports, likewise."""
    root = tmp_path_factory.mktemp("artifacts")
    made: dict[tuple[str, str], Artifact] = {}

    def get(family: str = "bert", task: str = "text-classification") -> Artifact:
        if (family, task) not in made:
            made[family, task] = export(tiny_folder(family, task), root / f"{family}-{task}", task=task)
        return made[family, task]

    return get
