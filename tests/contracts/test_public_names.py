"""Check that the public names are exactly the listed names, and that backend names are equal everywhere."""

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
    """No module of the package `accel` has the name of a public function. Importing such a module would replace the
    function.
    """
    import accel.stages.export

    assert callable(accel.export)
    modules = {path.stem for path in (ROOT / "accel").iterdir()}
    assert modules.isdisjoint(accel.__all__)


def test_every_task_has_a_model_class() -> None:
    for spec in all_tasks():
        model = model_class(spec.name)
        assert getattr(accel, model.__name__) is model


def test_backend_folders_entry_points_and_extras_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folders = {path.parent.name for path in (ROOT / "accel_plugins").glob("*/__init__.py")} - {"ortkit"}
    plugins = project["entry-points"]["accel.backends"]
    # Each folder has the name of its backend, without hyphens. The folder of the `pytorch` backend also contains the
    # two backends that compile PyTorch models.
    names = {name.replace("-", "_") for name in plugins}
    assert names - folders == {"inductor", "aotinductor"}
    assert folders <= names
    for name, value in plugins.items():
        spec = registry.describe(name)
        assert spec.extra in project["optional-dependencies"]
        assert spec.impl.startswith(f"{value.partition(':')[0]}.")
        assert (ROOT / "docs" / "backends" / f"{name}.md").is_file()


def test_core_does_not_depend_on_onnxruntime() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [item for item in project["dependencies"] if item.startswith("onnxruntime")]
