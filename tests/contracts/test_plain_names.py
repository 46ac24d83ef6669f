"""Check that variables, arguments, functions and classes have names that say what they contain or do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("accel", "accel_plugins", "distributions", "examples", "benchmarks", "docs", "tests")
WORDS = {
    *("one", "made", "found", "given", "held", "own", "beside", "kept", "seen", "taken", "said", "asked", "wanted"),
    *("known", "told", "whole"),
}
# Plugins may pass the argument `wanted` of this public function by name.
PUBLIC = {("accel/interfaces/session_contract/feeds.py", "wanted")}


def _names(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each name that the code below a node defines, with its line. Class attributes, such as fields, are not checked."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.lineno, child.name
        elif isinstance(child, ast.arg):
            yield child.lineno, child.arg
        elif isinstance(child, ast.alias | ast.ExceptHandler):
            yield child.lineno, (child.asname if isinstance(child, ast.alias) else child.name) or ""
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.lineno, child.id
        if not (isinstance(node, ast.ClassDef) and isinstance(child, ast.Assign | ast.AnnAssign)):
            yield from _names(child)


def test_names_say_what_they_contain() -> None:
    paths = {path.relative_to(ROOT).as_posix(): path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in sorted(paths.items())}
    names = [(path, line, name) for path, tree in trees.items() for line, name in _names(tree)]
    vague = [row for row in names if row[2].strip("_") in WORDS and (row[0], row[2]) not in PUBLIC]
    assert not vague, "\n".join(f"{path}:{line}: {name}" for path, line, name in vague)
