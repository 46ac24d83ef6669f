"""`accel explain` finds the place and the cause of planted faults."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import accel
from accel.artifact import Artifact
from accel.backends.plan import make_plan
from accel.backends.sessions import open_plan
from accel.cli import app
from accel.errors import ProbeError
from accel.explaining.explanation import explain
from tests.planted_faults import DENSE, Fault, bert_faults, change_weight, plant, replace_activation


@pytest.mark.parametrize("fault", list(bert_faults()), ids=lambda fault: fault.name)
def test_faults_are_named(fault: Fault, tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    planted = plant(tiny_artifact().path, tmp_path / "planted", fault.edit)
    explanation = explain(planted, remedies=False)
    named = [(cause.kind, cause.place) for cause in explanation.causes]
    assert explanation.first is not None
    assert named
    assert named[0][0] in fault.causes, named
    assert fault.place in named[0][1], named


def test_a_right_graph_has_no_cause(tiny_artifact: Callable[..., Artifact], tiny_ir: Callable[..., Artifact]) -> None:
    for artifact in (tiny_artifact(), tiny_ir()):
        explanation = explain(artifact)
        assert explanation.first is None
        assert not explanation.causes
        assert not explanation.rows
        assert max(place.made for place in explanation.places) < 1e-5
        assert len(explanation.places) > 20


def test_errors_are_split_into_made_and_carried(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    planted = plant(tiny_artifact().path, tmp_path / "planted", change_weight(DENSE, lambda w: -w))
    places = {place.place: place for place in explain(planted, remedies=False).places}
    assert places[DENSE].made == pytest.approx(places[DENSE].error, rel=1e-3)
    later = places["bert.encoder.layer.1.intermediate.dense"]
    assert later.error > 0.01
    assert later.made < 1e-5
    assert later.carried == pytest.approx(later.error, rel=1e-3)
    assert places["bert.encoder.layer.0.attention.self.query"].error < 1e-5


def test_two_artifacts_are_compared(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    planted = plant(tiny_artifact().path, tmp_path / "planted", change_weight(DENSE, lambda w: w * 2))
    explanation = explain(planted, tiny_artifact(), remedies=False)
    assert explanation.first == DENSE
    assert explanation.causes[0].kind == "scale"
    assert "multiplied by 2" in explanation.causes[0].detail


def test_an_openvino_graph_is_explained(
    tiny_ir: Callable[..., Artifact], tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(tiny_folder("bert", "text-classification"))
    with torch.no_grad():
        model.get_submodule(DENSE).weight[[0, 1]] = model.get_submodule(DENSE).weight[[1, 0]]
    explanation = explain(tiny_ir(), model.eval(), remedies=False)
    assert explanation.first == DENSE
    assert explanation.causes[0].kind == "weights"
    assert "swapped" in explanation.causes[0].detail


def test_remedies_of_a_quantized_artifact_are_measured(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    quantized = accel.quantize(tiny_artifact(), tmp_path / "int8", scheme="dynamic-int8")
    explanation = explain(quantized)
    assert {cause.kind for cause in explanation.causes} <= {"rounded activations", "outlier channel"}
    remedies = {remedy.name: remedy for remedy in explanation.remedies}
    again = remedies["the same settings again"].error
    assert again == pytest.approx(explanation.error, rel=1e-3)
    exact = remedies["float32 instead"].error
    assert exact is not None
    assert exact < 1e-5
    assert any(name.startswith("exclude=") for name in remedies)


def test_texts_and_changed_rows(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    planted = plant(tiny_artifact().path, tmp_path / "planted", change_weight("classifier", lambda w: -w))
    explanation = explain(planted, texts=["my card is lost", "a new pin please", "top up"], remedies=False)
    assert explanation.compared_rows == 3
    assert explanation.rows
    assert {row.text for row in explanation.rows} <= {"my card is lost", "a new pin please", "top up"}
    assert all(row.expected != row.actual for row in explanation.rows)


def test_another_tokenizer_is_named(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    planted = plant(tiny_artifact().path, tmp_path / "planted", lambda _: None)
    content = json.loads((planted.path / "tokenizer.json").read_text())
    content["normalizer"] = None
    (planted.path / "tokenizer.json").write_text(json.dumps(content))
    Artifact.create(planted.path, planted.manifest)
    kinds = {cause.kind for cause in explain(planted, remedies=False).causes}
    assert kinds == {"tokenizer"}


def test_the_command_writes_a_page(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    planted = plant(tiny_artifact().path, tmp_path / "planted", replace_activation("Relu"))
    arguments = ["explain", str(planted.path), "--no-remedies", "--report", str(tmp_path / "page.html")]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["causes"][0]["kind"] == "activation"
    assert "ReLU" in (tmp_path / "page.html").read_text()
    assert "activation" in CliRunner().invoke(app, arguments).stdout


@pytest.mark.thorough
def test_planted_faults_are_detected_before_any_answer(
    tiny_artifact: Callable[..., Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the faults that the probes detect and that `explain` names."""
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    detected, named, faults = [], [], list(bert_faults())
    for number, fault in enumerate(faults):
        planted = plant(tiny_artifact().path, tmp_path / f"planted-{number}", fault.edit)
        try:
            open_plan(make_plan(planted)).close()
        except ProbeError:
            detected.append(fault.name)
        causes = explain(planted, remedies=False).causes
        if causes and causes[0].kind in fault.causes:
            named.append(fault.name)
    missed = sorted({fault.name for fault in faults} - set(detected))
    assert len(detected) >= math.floor(0.9 * len(faults)), missed
    assert len(named) >= math.floor(0.75 * len(faults))
