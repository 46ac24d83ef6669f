"""Check the structure of the source tree: the number of packages and dependencies, the size of modules, and that the
core contains no vendor names.

import-linter (`make check`) checks which package may import which other package.
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
# These packages may contain vendor names. `capture` calls transformers' exporters by name, and the other packages read
# or write formats of other tools.
ABOUT_VENDORS = ("accel/capture/", "accel/upstream/", "accel/compat/", "accel/deploying/", "accel/cli/deploy.py")
VENDORS = re.compile(r"onnxruntime|openvino|tensorrt|nncf|neural_compressor", re.IGNORECASE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("room", sorted(ROOMS - {"tasks"}))
def test_package_docstring_states_input_and_output(room: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / "accel" / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert "In: " in text
    assert "Out: " in text


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_core_contains_no_vendor_names(path: Path) -> None:
    if name_of(path).startswith(ABOUT_VENDORS):
        pytest.skip("this module may contain vendor names, because it reads or writes the format of another tool")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and _has_docstring(node)
    }
    violations = {
        f"line {node.lineno}: {word}"
        for node in ast.walk(tree)
        if id(node) not in docstrings and (word := _word(node)) and VENDORS.search(word)
    }
    assert not violations


def _has_docstring(node: ast.AST) -> bool:
    return ast.get_docstring(node) is not None  # type: ignore[arg-type]


def _word(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return str(getattr(node, "id", getattr(node, "attr", "")))


# The packages are in dependency order: a package imports only packages that come before it in this list. `make check`
# enforces the same order for imports at run time.
ORDER = (
    *("errors", "config", "progress", "artifact", "upstream", "interfaces", "families", "capture", "backends", "data"),
    *(
        "stages",
        "decoding",
        "models",
        "measuring",
        "tuning",
        "explaining",
        "auditing",
        "serving",
        "deploying",
        "tasks",
        "testing",
        "demo",
        "cli",
    ),
    "compat",
)
PARTS = ("compat", "tasks", "families")
"""Packages whose module and class names come from other libraries, or from tasks and model families."""


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "accel").parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """Return the dotted names of `accel` modules that a module imports, including imports only for type checkers."""
    package = path.relative_to(ROOT).parts[:-1]
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            parts = [*base, *(node.module.split(".") if node.module else [])]
            if parts == ["accel"]:
                modules |= {f"accel.{alias.name}" for alias in node.names}
            elif parts[:1] == ["accel"]:
                modules.add(".".join(parts))
    return modules


def later(room: str, other: str) -> bool:
    return room in ORDER and other in ORDER and ORDER.index(other) > ORDER.index(room)


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_packages_refer_only_to_lower_packages(path: Path) -> None:
    room = room_of(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and _has_docstring(node)
    }
    paths = {
        node.value
        for node in ast.walk(tree)
        if id(node) not in docstrings
        and isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"accel(\.\w+)+(:\w+)?", node.value)
    }
    pointed = {name for name in imported_modules(path) | paths if later(room, name.split(".")[1])}
    assert not pointed


def test_packages_are_those_in_the_order() -> None:
    assert set(ORDER) == {room_of(path) for path in CORE} - {"__init__", "__main__", "_version"}


def repeated(pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names that occur in more than one place, with their places."""
    places: dict[str, list[str]] = {}
    for name, place in pairs:
        places.setdefault(name, []).append(place)
    return {name: locations for name, locations in places.items() if len(locations) > 1}


def test_module_names_are_unique() -> None:
    modules = [path for path in CORE if room_of(path) not in PARTS and not path.stem.startswith("__")]
    duplicates = repeated([(path.stem, name_of(path)) for path in modules])
    assert not duplicates


def test_public_class_names_are_unique() -> None:
    # Triton requires a class with the name `TritonPythonModel` in each Python model, so this name may occur several
    # times.
    duplicates = repeated(
        [
            (node.name, name_of(path))
            for path in CORE
            if room_of(path) not in PARTS
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != "TritonPythonModel"
        ]
    )
    assert not duplicates


def test_search_is_implemented_once() -> None:
    """Only `Search.run` builds, times and grades candidates. The modules `quantize_within_budget`, `conversion` and
    `tune` only propose candidates.
    """
    parts = {"builder", "timer", "grader"}
    classes = {"ArtifactBuilder", "CandidateTimer", "AccuracyGrader"}
    calls, presets = set(), set()
    for path in CORE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = node.func if isinstance(node, ast.Call) else None
            owner = getattr(
                getattr(function, "value", None), "attr", getattr(getattr(function, "value", None), "id", "")
            )
            if isinstance(function, ast.Name) and function.id in classes:
                calls.add((name_of(path), function.id))
            elif isinstance(function, ast.Attribute) and owner in parts and function.attr in _MEASURES:
                calls.add((name_of(path), function.attr))
            elif isinstance(function, ast.Attribute) and (owner, function.attr) == ("search", "run"):
                presets.add(path.stem)
    assert calls == {("accel/tuning/search.py", name) for name in (*_MEASURES, *classes)}
    assert presets == {"quantize_within_budget", "conversion", "tune"}


_MEASURES = ("begin", "finish", "screen", "finals", "grade")
