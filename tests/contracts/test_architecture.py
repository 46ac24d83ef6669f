"""What a reader should see from the tree: few rooms, few arrows, modules of a size to be read, no vendor in the core.

Which room may import which is import-linter's business (`make check`).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = sorted((ROOT / "accel").rglob("*.py"))
ALL = [*CORE, *sorted((ROOT / "accel_plugins").rglob("*.py"))]
ROOMS = {path.name for path in (ROOT / "accel").iterdir() if (path / "__init__.py").is_file()}
# `capture` calls transformers' exporters by their names; the reader of foreign folders is about other tools' formats.
ABOUT_VENDORS = ("accel/capture/", "accel/stages/foreign/", "accel/compat/", "accel/deploying/", "accel/cli/deploy.py")
VENDORS = re.compile(r"onnxruntime|openvino|tensorrt|nncf|neural_compressor", re.IGNORECASE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("room", sorted(ROOMS - {"tasks"}))
def test_a_room_says_what_lives_there(room: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / "accel" / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert "In: " in text
    assert "Out: " in text


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_the_core_holds_no_vendors_name(path: Path) -> None:
    if name_of(path).startswith(ABOUT_VENDORS):
        pytest.skip("its subject is another tool's format")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    said = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and _has_docstring(node)}
    found = {
        f"line {node.lineno}: {word}"
        for node in ast.walk(tree)
        if id(node) not in said and (word := _word(node)) and VENDORS.search(word)
    }
    assert not found


def _has_docstring(node: ast.AST) -> bool:
    return ast.get_docstring(node) is not None  # type: ignore[arg-type]


def _word(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return str(getattr(node, "id", getattr(node, "attr", "")))
