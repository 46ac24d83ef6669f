"""Check that the public names are exactly the listed names, and that backend names agree everywhere."""

from __future__ import annotations

import tomllib
from pathlib import Path

import accel
from accel.backends import registry
from accel.interfaces.task_registry import all_tasks
from accel.models.base import model_class

ROOT = Path(__file__).parents[2]


def test_every_listed_name_exists() -> None:
    for name in accel.__all__:
        assert getattr(accel, name) is not None
    assert set(accel.__all__) <= set(dir(accel))


def test_functions_are_not_shadowed_by_modules() -> None:
    """A submodule with the name of a public function would replace the function when it is imported."""
    import accel.stages.export

    assert callable(accel.export)
    modules = {path.stem for path in (ROOT / "accel").iterdir()}
    assert modules.isdisjoint(accel.__all__)


def test_every_task_has_its_class() -> None:
    for spec in all_tasks():
        model = model_class(spec.name)
        assert getattr(accel, model.__name__) is model


def test_folders_are_entry_points_are_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folders = {path.parent.name for path in (ROOT / "accel_plugins").glob("*/__init__.py")} - {"ortkit"}
    plugins = project["entry-points"]["accel.backends"]
    # Each folder has the name of its backend, without hyphens. PyTorch's folder also contains the two backends that
    # compile models.
    names = {name.replace("-", "_") for name in plugins}
    assert names - folders == {"inductor", "aotinductor"}
    assert folders <= names
    for name, value in plugins.items():
        spec = registry.describe(name)
        assert spec.extra in project["optional-dependencies"]
        assert spec.impl.startswith(f"{value.partition(':')[0]}.")
        assert (ROOT / "docs" / "backends" / f"{name}.md").is_file()


def test_core_depends_on_no_onnx_runtime() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [item for item in project["dependencies"] if item.startswith("onnxruntime")]
