"""Check that no code outside of `accel.families` names a model type. Other code calls the model family's object, or
runs the model to find a property.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from accel.families import MODULES
from accel.interfaces.family import Family
from accel.interfaces.family_registry import family_of

ROOT = Path(__file__).parents[2]
ROOMS_WITH_MODEL_TYPES = ("accel/families/", "accel/compat/", "accel/testing/")
CHECKED = [
    path
    for room in ("accel", "accel_plugins")
    for path in sorted((ROOT / room).rglob("*.py"))
    if not str(path.relative_to(ROOT)).startswith(ROOMS_WITH_MODEL_TYPES)
]

# Each entry is (text, modules or folders that may contain the text, reason).
EXCEPTIONS = (
    (
        "opt",
        ("accel/", "accel_plugins/ortkit/engines/", "accel_plugins/tensorrt/"),
        "the size in a TensorRT profile that kernels are chosen for",
    ),
    ("clip", ("accel/tasks/",), "a column of videos"),
    ("cohere", ("accel/serving/http/",), "a company, whose HTTP interface is offered"),
    ("Attention", ("accel_plugins/",), "an operator of ONNX Runtime"),
    ("MultiHeadAttention", ("accel_plugins/",), "an operator of ONNX Runtime"),
    ("CLIPModel", ("accel/artifact/sentence_settings.py",), "a module of sentence-transformers"),
    (
        "Transformer",
        ("accel/artifact/sentence_settings.py", "accel/artifact/sentence_fields.py"),
        "a module of sentence-transformers",
    ),
    ("WhisperGenerationMixin", ("accel/upstream/long_form_speech.py",), "the private name that this module is about"),
    ("__name__", ("accel/data/columns.py",), "classes of `datasets`, which is not imported for them"),
    (
        "__name__",
        (
            "accel/artifact/processor_loading.py",
            "accel/tasks/question_answering_pipeline.py",
            "accel/deploying/triton/",
        ),
        "classes of tokenizers' Rust code, which cannot be imported",
    ),
)


@functools.cache
def classes_of_models() -> frozenset[str]:
    """Return the class names in the model modules of transformers, without auto classes."""
    folder = Path(transformers.__file__).parent / "models"
    return frozenset(
        node.name
        for path in folder.glob("*/*.py")
        if path.parent.name != "auto"
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )


def is_of_a_model(module: str) -> bool:
    return module.startswith("transformers.models.") and not module.startswith("transformers.models.auto")


def words(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the model types and model class names that a module mentions, with their line numbers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # Collect expression statements, such as docstrings, because their text is skipped.
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if node.value in CONFIG_MAPPING_NAMES or node.value in classes_of_models() or is_of_a_model(node.value):
                yield node.value, node.lineno
        elif isinstance(node, ast.Attribute) and node.attr in classes_of_models():
            yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            for alias in node.names:
                of_transformers = module.split(".")[0] == "transformers"
                if is_of_a_model(f"{module}.") or (of_transformers and alias.name in classes_of_models()):
                    yield alias.name, node.lineno
        elif isinstance(node, ast.Compare):
            yield from compared(node)


def compared(node: ast.Compare) -> Iterator[tuple[str, int]]:
    """Yield each comparison of a model type or a class name with a literal, with its line number."""
    operands = [node.left, *node.comparators]
    if not any(holds_a_literal(operand) for operand in operands):
        return
    for operand in operands:
        for part in ast.walk(operand):
            if is_a_model_type(part):
                yield "model_type", node.lineno
            elif isinstance(part, ast.Attribute) and part.attr == "__name__" and is_a_class(part.value):
                yield "__name__", node.lineno


def holds_a_literal(node: ast.AST) -> bool:
    items = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return any(isinstance(item, ast.Constant) and isinstance(item.value, str) for item in items)


def is_a_model_type(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "model_type"
    is_read = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("get", "getattr")
    return is_read and any(isinstance(arg, ast.Constant) and arg.value == "model_type" for arg in node.args)


def is_a_class(node: ast.AST) -> bool:
    return ast.unparse(node).startswith("type(") or (isinstance(node, ast.Attribute) and node.attr == "__class__")


def is_excepted(word: str, path: str) -> bool:
    return any(word == excepted and path.startswith(places) for excepted, places, _ in EXCEPTIONS)


@pytest.mark.parametrize("path", CHECKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_model_type_outside_of_families(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    model_types = {f"line {line}: {word}" for word, line in words(path) if not is_excepted(word, name)}
    assert not model_types, (
        "ask accel.interfaces.family_registry.family_of(config), and put the fact into the family's module"
    )


def test_exceptions_are_few() -> None:
    assert len(EXCEPTIONS) <= 10


@pytest.mark.parametrize("model_type", MODULES)
def test_listed_family_has_a_module(model_type: str) -> None:
    assert type(family_of({"model_type": model_type})) is not Family
    assert model_type in CONFIG_MAPPING_NAMES


def test_families_import_only_interfaces_and_upstream() -> None:
    for path in (ROOT / "accel" / "families").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 2:
                assert (node.module or "").split(".")[0] in ("errors", "interfaces", "upstream"), path


def test_family_table_imports_no_family() -> None:
    tree = ast.parse((ROOT / "accel" / "families" / "__init__.py").read_text(encoding="utf-8"))
    assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree))
