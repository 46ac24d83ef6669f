"""A task is one spec: what is said there is enough for export, evaluation, pipelines and searches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.artifact import Artifact
from accel.interfaces.task_registry import task_spec

_MODULE = """
from accel.interfaces.task_spec import Column, TaskSpec

SPEC = TaskSpec(
    name="intent-detection",
    impl="intent_task:IntentDetection",
    auto_model="AutoModelForSequenceClassification",
    output="SequenceClassifierOutput",
    outputs={"logits": ("batch", "num_labels")},
    synonyms=("intents",),
    own_pipelines=("intent-detection",),
    columns=(
        Column(use="label", known=("wish",), holds="label", needed="measuring", answer=True),
        Column(use="text", known=("said",), holds="text"),
    ),
)
"""

_TASK = """
import transformers
from accel import ORTModelForSequenceClassification
from accel.interfaces.task import Task
from accel.measuring.accuracy.predictors import Classes


class IntentDetection(Task):
    model = ORTModelForSequenceClassification

    def predictor(self, config):
        return Classes

    def pipeline(self, name):
        return transformers.TextClassificationPipeline
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Another distribution that brings a task."""
    site = tmp_path / "site"
    metadata = site / "intents-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: intents\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(
        "[accel.tasks]\nintent-detection = intents_of_a_stranger:SPEC\n", encoding="utf-8"
    )
    (site / "intents_of_a_stranger.py").write_text(_MODULE, encoding="utf-8")
    (site / "intent_task.py").write_text(_TASK, encoding="utf-8")
    monkeypatch.syspath_prepend(site)
    return "intent-detection"


def rows_labelled_by(model: Any) -> list[dict[str, Any]]:
    """Rows in the task's own columns, with the model's answers as labels."""
    texts = [f"{a} my {b}" for a in ("where is", "i lost", "please help") for b in ("card", "money", "phone", "pin")]
    answers = accel.pipeline("text-classification", model=model)(texts)
    return [{"said": text, "wish": answer["label"]} for text, answer in zip(texts, answers, strict=True)]


def test_a_task_is_one_spec(
    task: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    assert task_spec("intents").name == task
    classifier = accel.ORTModelForSequenceClassification(tiny_artifact())
    rows = rows_labelled_by(classifier)
    artifact = accel.export(tiny_folder(), tmp_path / "artifact", task=task)
    assert artifact.task == task
    assert accel.evaluate(artifact, rows).value == 1.0
    found = accel.pipeline(task, model=artifact.path)("where is my card")
    assert found[0]["label"] == rows[0]["wish"]


@pytest.mark.thorough
def test_a_search_takes_a_task_of_another_distribution(
    task: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    rows = rows_labelled_by(accel.ORTModelForSequenceClassification(tiny_artifact()))
    made = accel.tune(
        tiny_folder(), tmp_path / "tuned", task=task, data=rows, backends=["pytorch"], sequence=[8], max_drop=20
    )
    assert made.artifact.task == task
    assert made.reference == 1.0


def test_an_entry_point_that_holds_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "wrong-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[accel.tasks]\nwrong = os:path\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(accel.AccelError, match="holds no TaskSpec of that name"):
        task_spec("nothing-of-the-kind")
