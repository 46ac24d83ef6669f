"""Check that the example task installs as a separate package, and that it works from export to server without changes
in accel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

import accel
from accel.artifact import TensorSpec
from accel.capture import feeds_for
from accel.data.columns import map_columns
from accel.data.rows import load_rows
from accel.errors import PluginError
from accel.interfaces.task_registry import load_task, measured_tasks, task_spec
from accel.measuring.accuracy.predictors import predictor_for
from accel.models.pipelines.pipeline import pipeline_class
from accel.serving.http.text_tensors import arrays_of
from accel.serving.operations import Operation

EXAMPLE = Path(__file__).parents[2] / "examples" / "span_task"


def installed(site: Path, name: str, entry: str) -> None:
    """Write the files that pip writes when it installs a distribution with a task."""
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[accel.tasks]\n{entry}\n", encoding="utf-8")


@pytest.mark.parametrize(
    "part", ["not quantize and not tune", pytest.param("quantize or tune", marks=pytest.mark.thorough)]
)
def test_example_task_passes_its_tests(part: str, tmp_path: Path) -> None:
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


def test_entry_point_without_task_does_not_affect_other_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(tmp_path, "wrong", "wrong = os:path")
    monkeypatch.syspath_prepend(tmp_path)
    assert task_spec("text-classification").name == "text-classification"
    assert "does not refer to a TaskSpec" in caplog.text
    with pytest.raises(accel.AccelError, match="does not refer to a TaskSpec"):
        task_spec("wrong")


def test_task_that_cannot_be_imported_does_not_affect_other_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(tmp_path, "unimportable", "unimportable = unimportable_task:SPEC")
    text = 'from accel.interfaces.task_spec import TaskSpec\n\nSPEC = TaskSpec(name="unimportable", impl="no_such_module:Task")\n'
    (tmp_path / "unimportable_task.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert "text-classification" in measured_tasks()
    assert "'unimportable' cannot be imported" in caplog.text


def test_task_without_task_class_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "classless", "classless = classless_task:SPEC")
    text = 'from accel.interfaces.task_spec import TaskSpec\n\nSPEC = TaskSpec(name="classless", impl="os:path")\n'
    (tmp_path / "classless_task.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(accel.AccelError, match="not a subclass of accel's class Task"):
        load_task("classless")


def test_errors_name_missing_parts_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "bare", "bare = bare_task:SPEC")
    text = """from accel.interfaces.task_spec import Column, TaskSpec

SPEC = TaskSpec(name="bare", own_pipelines=("bare",), suffixes=("Bare",), columns=(Column(use="text", known=("text",), holds="text"),))
"""
    (tmp_path / "bare_task.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(accel.AccelError, match=r"returned None instead of a pipeline class.*\n?.*Task\.pipeline"):
        pipeline_class("bare")
    with pytest.raises(accel.AccelError, match=r"Task\.predictor"):
        predictor_for("bare", None)
    rows = map_columns(load_rows([{"text": "my card"}]), "bare")
    with pytest.raises(accel.AccelError, match="No column of rows is mapped to 'label'; columns are mapped to text"):
        rows.column("label")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["OurBare"], "model_type": "our-bare"}', encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(accel.AccelError, match="no class 'OurBare'"):
        accel.export(folder, tmp_path / "out", task="bare")


def test_unknown_column_type_lists_the_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "odd", "odd = odd_task:SPEC")
    text = """from accel.interfaces.task_spec import Column, TaskSpec

SPEC = TaskSpec(name="odd", suffixes=("Odd",), columns=(Column(use="score", known=("score",), holds="float"),))
"""
    (tmp_path / "odd_task.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match="column 'score' with the unknown value holds='float'") as error:
        map_columns(load_rows([{"score": 0.5}]), "odd")
    assert "number" in str(error.value.fix)


@pytest.mark.parametrize("values", [[[1.0], [1.0, 2.0]], [0.5, 0.5]], ids=["unequal", "scalars"])
def test_text_tensors_must_be_rectangular(values: list[Any]) -> None:
    class Scores(Operation):
        def tensor_outputs(self, model: Any) -> Mapping[str, tuple[str, int]]:
            return {"SCORES": ("FP32", -1)}

        def tensor_values(self, answer: Any, model: Any) -> Mapping[str, Any]:
            return {"SCORES": answer}

    with pytest.raises(PluginError, match="for the output 'SCORES' that do not form a rectangular tensor"):
        arrays_of(Scores("scores"), values, cast("Any", None))


def test_ids_stay_within_a_nested_vocabulary_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"reader": {"vocab_size": 7}}', encoding="utf-8")
    spec = TensorSpec("input_ids", "int64", ("batch", "sequence"))
    feeds = feeds_for([spec], {"batch": 4, "sequence": 50}, seed=0, folder=tmp_path)
    assert int(feeds["input_ids"].max()) < 7
