"""A task from outside the tree: the example installs like a stranger's package and goes from export to server, with no change in accel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import accel
from accel.interfaces.task_registry import load_task, measured_tasks, task_spec

EXAMPLE = Path(__file__).parents[2] / "examples" / "span_task"


def installed(site: Path, name: str, entry: str) -> None:
    """What pip writes for a distribution with a task."""
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[accel.tasks]\n{entry}\n", encoding="utf-8")


@pytest.mark.parametrize(
    "part", ["not quantize and not tune", pytest.param("quantize or tune", marks=pytest.mark.thorough)]
)
def test_the_example(part: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    installed(site, "accel_spans", "span-extraction = accel_spans:SPEC")
    shutil.copytree(EXAMPLE / "accel_spans", site / "accel_spans")
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    path = os.pathsep.join([str(site), str(EXAMPLE.parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", part, str(tmp_path / "tests")],
        env={**os.environ, "PYTHONPATH": path, "ACCEL_HOME": str(tmp_path / "home")}, capture_output=True, text=True,
        check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_an_entry_point_that_holds_no_task_disturbs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(tmp_path, "wrong", "wrong = os:path")
    monkeypatch.syspath_prepend(tmp_path)
    assert task_spec("text-classification").name == "text-classification"
    assert "holds no TaskSpec of that name" in caplog.text
    with pytest.raises(accel.AccelError, match="holds no TaskSpec of that name"):
        task_spec("wrong")


def test_a_task_whose_module_cannot_be_imported_disturbs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(tmp_path, "unimportable", "unimportable = unimportable_task:SPEC")
    text = 'from accel.interfaces.task_spec import TaskSpec\n\nSPEC = TaskSpec(name="unimportable", impl="no_such_module:Task")\n'
    (tmp_path / "unimportable_task.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert "text-classification" in measured_tasks()
    assert "'unimportable' cannot be loaded" in caplog.text


def test_a_task_whose_class_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "classless", "classless = classless_task:SPEC")
    text = 'from accel.interfaces.task_spec import TaskSpec\n\nSPEC = TaskSpec(name="classless", impl="os:path")\n'
    (tmp_path / "classless_task.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(accel.AccelError, match="no subclass of Task"):
        load_task("classless")
