"""Check that only the package `accel.tasks` contains task names. Other code finds a task by its name or by a property."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from accel.interfaces.task_registry import all_tasks

ROOT = Path(__file__).parents[2]
MODULES = sorted([*(ROOT / "accel").rglob("*.py"), *(ROOT / "accel_plugins").rglob("*.py")])
# These packages may contain task names. The specs of backends may also contain the names of tasks to which a capability
# is limited.
NAMING = ("accel/tasks/", "accel/testing/", "accel/demo/", "accel/compat/")
SPECS = tuple(
    f"accel_plugins/{path.parent.name}/__init__.py" for path in (ROOT / "accel_plugins").glob("*/__init__.py")
)
NAMES = {
    word for spec in all_tasks() for word in (*spec.serves, *(synonym for synonym in spec.synonyms if "-" in synonym))
}
OTHER_MEANINGS = {
    # These strings are names of model kinds and modules in sentence-transformers.
    ("accel/artifact/sentence_settings.py", "cross-encoder"),
    ("accel/artifact/sentence_settings.py", "feature-extraction"),
    ("accel/artifact/sentence_settings.py", "sequence-classification"),
    ("accel/artifact/sentence_settings.py", "fill-mask"),
    ("accel/artifact/sentence_settings.py", "text-generation"),
    ("accel/stages/sentence_comparison.py", "cross-encoder"),
}


def named(path: Path) -> set[str]:
    """Return the task names in the strings of a module, without docstrings and the help texts of commands."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)  # type: ignore[attr-defined]
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in docstrings and node.value in NAMES
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_contains_no_task_name(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    if name.startswith(NAMING) or name in SPECS:
        pytest.skip("this module may contain task names, because it defines them")
    assert not {word for word in named(path) if (name, word) not in OTHER_MEANINGS}
