"""Fixtures: a folder for transformers.js of each architecture, with PyTorch's answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from accel.stages.folder_layouts import WrittenFolder, write_layout

from .cases import ARCHITECTURES, Reference, reference


@dataclass(frozen=True, slots=True)
class Converted:
    """A folder for transformers.js, and PyTorch's answers for its source."""

    folder: WrittenFolder
    reference: Reference


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Converted]:
    """Return a function that converts an architecture. The first call with an architecture converts it."""
    root, done = tmp_path_factory.mktemp("javascript"), dict[str, Converted]()

    def get(name: str) -> Converted:
        if name not in done:
            architecture, source = ARCHITECTURES[name], Path(root / "sources" / name)
            architecture.save(source)
            folder = write_layout(source, root / name, layout="transformers.js", task=architecture.task)
            done[name] = Converted(folder, reference(architecture, source))
        return done[name]

    return get


@pytest.fixture(scope="session")
def measured() -> Iterator[Callable[..., None]]:
    """Return a function that records a difference from PyTorch. All differences go to the file `ACCEL_JAVASCRIPT_RESULTS`, if it is set."""
    differences: dict[str, dict[str, dict[str, float]]] = {}

    def record(place: str, name: str, dtype: str, difference: float) -> None:
        differences.setdefault(place, {}).setdefault(name, {})[dtype] = float(f"{difference:.2g}")

    yield record
    if file := os.environ.get("ACCEL_JAVASCRIPT_RESULTS"):
        Path(file).write_text(json.dumps(differences, indent=2) + "\n", encoding="utf-8")
