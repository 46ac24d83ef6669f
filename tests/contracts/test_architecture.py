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
ABOUT_VENDORS = ("accel/capture/", "accel/upstream/", "accel/compat/", "accel/deploying/", "accel/cli/deploy.py")
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


# Rooms from the ground up; a room imports only rooms before it. `make check` holds imports at run time to the same order.
ORDER = (
    *("errors", "config", "progress", "artifact", "upstream", "interfaces", "families", "capture", "backends", "data"),
    *("stages", "decoding", "models", "measuring", "tuning", "serving", "deploying", "tasks", "testing", "demo", "cli"),
    "compat",
)
PARTS = ("compat", "tasks", "families")
"""Rooms whose module and class names are other libraries', or their tasks' and families' own."""


# Still to be mended: the lists only get shorter.
POINT_UPWARD = ("accel/interfaces/entry_points.py", "accel/interfaces/protocols.py")
SHARED_CLASS_NAMES = frozenset(("Service",))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "accel").parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """Dotted modules of `accel` that a module imports, for type checkers too."""
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            parts = [*base, *(node.module.split(".") if node.module else [])]
            if parts == ["accel"]:
                found |= {f"accel.{alias.name}" for alias in node.names}
            elif parts[:1] == ["accel"]:
                found.add(".".join(parts))
    return found


def later(room: str, other: str) -> bool:
    return room in ORDER and other in ORDER and ORDER.index(other) > ORDER.index(room)


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_nothing_points_to_a_later_room(path: Path) -> None:
    room = room_of(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and _has_docstring(node)
    }
    paths = {
        node.value
        for node in ast.walk(tree)
        if id(node) not in said
        and isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"accel(\.\w+)+(:\w+)?", node.value)
    }
    pointed = {name for name in imported_modules(path) | paths if later(room, name.split(".")[1])}
    assert not pointed or name_of(path) in POINT_UPWARD


def test_rooms_are_those_of_the_design() -> None:
    assert set(ORDER) == {room_of(path) for path in CORE} - {"__init__", "__main__", "_version"}


def repeated(pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that several places have."""
    places: dict[str, list[str]] = {}
    for name, place in pairs:
        places.setdefault(name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_module_names_are_unique() -> None:
    modules = [path for path in CORE if room_of(path) not in PARTS and not path.stem.startswith("__")]
    found = repeated([(path.stem, name_of(path)) for path in modules])
    assert not found


def test_public_class_names_are_unique() -> None:
    # Triton looks for a class of this name in each model's folder.
    found = repeated(
        [
            (node.name, name_of(path))
            for path in CORE
            if room_of(path) not in PARTS
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != "TritonPythonModel"
        ]
    )
    assert not {name: places for name, places in found.items() if name not in SHARED_CLASS_NAMES}
