"""Functions that read the stored folders of other tools, and the stored outputs of these tools for each question (model
input).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOREIGN = Path(__file__).parents[1] / "fixtures" / "foreign"
ARCHIVE = FOREIGN / "settings" / "folders.tar.xz"


def _questions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("foreign_questions", ARCHIVE.parent / "questions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


questions: Any = _questions()


def stored(folders: Path, tool: str, name: str) -> Any:
    """Return the stored outputs of a tool for a model, with one entry for each question."""
    return json.loads((folders / "answers" / f"{tool}-{name}.json").read_text(encoding="utf-8"))


def same(actual: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two outputs are equal. Numbers may differ by a relative tolerance."""
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and actual.keys() == expected.keys()
            and all(same(actual[name], expected[name], tolerance) for name in expected)
        )
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(
            same(item, other, tolerance) for item, other in zip(actual, expected, strict=True)
        )
    if isinstance(expected, float):
        return bool(abs(actual - expected) <= tolerance * max(1, abs(expected)))
    return bool(actual == expected)
