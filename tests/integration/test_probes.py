"""Artifacts contain probes, and an artifact whose outputs are wrong on this machine is not opened."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from typer.testing import CliRunner

import accel
from accel import ORTModelForSequenceClassification
from accel.artifact import Artifact
from accel.artifact.manifest import MANIFEST
from accel.artifact.probe_file import PROBES
from accel.backends import registry
from accel.backends.plan import RunPreferences, make_plan
from accel.backends.sessions import OpenSessions, open_plan
from accel.capture import probes as probes_module
from accel.capture.noise import Noise
from accel.capture.probes import read_probes
from accel.cli import app
from accel.config import SessionOptions
from accel.errors import ArtifactNotFoundError, IntegrityError, ProbeError
from accel.interfaces import cpu_features
from accel.stages.quantize import quantize
from accel.testing.copies_without_manifest import as_foreign
from accel.testing.models import save_tiny
from accel_plugins.ortkit.runtime.session import OrtSession
from tests.planted_faults import plant


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new `ACCEL_HOME`, in which no check is remembered."""
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each graph whose probes run."""
    graphs: list[str] = []
    run = probes_module.run_probes

    def counted(sessions: Any, probes: Any) -> Any:
        graphs.extend(probe.component for probe in probes)
        return run(sessions, probes)

    monkeypatch.setattr(probes_module, "run_probes", counted)
    return graphs


def changed_outputs(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Change the outputs of all ONNX Runtime sessions, as a wrong kernel would."""
    run = OrtSession.run

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        return {name: change(self, value) for name, value in run(self, *args, **kwargs).items()}

    monkeypatch.setattr(OrtSession, "run", wrong)


def opened(artifact: Artifact, **settings: Any) -> OpenSessions:
    return open_plan(make_plan(artifact, RunPreferences(**settings)))


def test_an_export_stores_probes_and_records_them(tiny_artifact: Callable[..., Artifact]) -> None:
    artifact = tiny_artifact()
    probes = read_probes(artifact)
    assert probes is not None
    assert (artifact.path / PROBES).stat().st_size < 100_000
    assert PROBES in {record.name for record in artifact.manifest.files}
    calls = [probe.calls[0].feeds for probe in probes.probes]
    masks = [feeds["attention_mask"] for feeds in calls]
    assert any(isinstance(mask, torch.Tensor) and not mask.all() for mask in masks), "no probe has padding"
    assert len({tuple(mask.shape) for mask in masks if isinstance(mask, torch.Tensor)}) == 2
    assert probes.measured["model/logits"].largest < 1e-5


@pytest.mark.parametrize("family", ["llama", "t5", "whisper", "llava"])
def test_a_decoder_gets_a_prompt_and_two_steps(family: str, generator: Callable[..., Artifact]) -> None:
    artifact = generator(family)
    probes = read_probes(artifact)
    assert probes is not None
    assert {probe.component for probe in probes.probes} == {component.name for component in artifact.components}
    assert next(len(probe.calls) for probe in probes.probes if probe.stateful) == 3


def test_probes_run_at_the_first_opening_only(
    home: Path, runs: list[str], tiny_artifact: Callable[..., Artifact]
) -> None:
    opened(tiny_artifact()).close()
    assert runs == ["model", "model"]
    opened(tiny_artifact()).close()
    opened(tiny_artifact(), options=SessionOptions(threads=1)).close()
    assert runs == ["model", "model"]


@pytest.mark.parametrize("change", ["runtime", "processor", "options", "artifact"])
def test_probes_run_again_after_a_change(
    change: str,
    home: Path,
    runs: list[str],
    tiny_artifact: Callable[..., Artifact],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    artifact = tiny_artifact()
    opened(artifact).close()
    runs.clear()
    settings: dict[str, Any] = {}
    if change == "runtime":
        new_runtime(monkeypatch)
    elif change == "processor":
        monkeypatch.setattr("accel.backends.probe_checks.cpu_flags", lambda: ("avx2",))
    elif change == "options":
        settings["options"] = SessionOptions(graph_optimization="basic")
    else:
        artifact = tiny_artifact("distilbert")
    opened(artifact, **settings).close()
    assert runs == ["model", "model"]


def new_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all backends report another version."""
    probe = registry.probe

    def newer(spec: Any) -> Any:
        return dataclasses.replace(probe(spec), versions={"onnxruntime": "99.0"})

    monkeypatch.setattr(registry, "probe", newer)


def test_wrong_outputs_are_refused_with_what_changed(
    home: Path, tiny_artifact: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = tiny_artifact()
    opened(artifact).close()
    new_runtime(monkeypatch)
    changed_outputs(monkeypatch, lambda _, value: value * 1.001)
    with pytest.raises(ProbeError, match=r"'logits'.*right on this machine on .*onnxruntime: [\d.]+ -> 99.0") as error:
        ORTModelForSequenceClassification.from_pretrained(artifact.path)
    assert isinstance(error.value, IntegrityError)
    # The failure is not remembered: the next opening checks again.
    with pytest.raises(ProbeError):
        opened(artifact)


def test_a_first_opening_on_a_machine_is_compared_with_the_machine_that_made_the_artifact(
    home: Path, tiny_artifact: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_outputs(monkeypatch, lambda _, value: value.flip(0))
    monkeypatch.setattr("accel.backends.probe_checks.processor_name", lambda: "another processor")
    with pytest.raises(ProbeError, match="right where it was made.*processor: .* -> another processor"):
        opened(tiny_artifact())


def test_settings_with_right_outputs_are_used_and_remembered(
    home: Path,
    runs: list[str],
    tiny_artifact: Callable[..., Artifact],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fusion computes wrong values, so the artifact is opened with fewer graph optimizations."""
    import onnxruntime

    everything = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL

    def wrong(session: Any, value: torch.Tensor) -> torch.Tensor:
        level = session.runtime.get_session_options().graph_optimization_level
        return value + 0.1 if level == everything else value

    changed_outputs(monkeypatch, wrong)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="accel"):
            sessions = opened(tiny_artifact())
        assert sessions.options.graph_optimization == "basic"
        assert "graph_optimization='basic', because it differs from PyTorch" in caplog.text
    assert len(runs) == 4, "the second opening does not run the probes"


def test_the_check_can_be_turned_off(
    home: Path, runs: list[str], tiny_artifact: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_outputs(monkeypatch, lambda _, value: value + 1)
    monkeypatch.setenv("ACCEL_PROBES", "0")
    opened(tiny_artifact()).close()
    assert not runs


def test_artifacts_of_earlier_versions_open(home: Path, tmp_path: Path, tiny_artifact: Callable[..., Artifact]) -> None:
    shutil.copytree(tiny_artifact().path, tmp_path / "old")
    (tmp_path / "old" / PROBES).unlink()
    old = Artifact.create(tmp_path / "old", tiny_artifact().manifest)
    opened(old).close()
    with pytest.raises(ArtifactNotFoundError, match="has no probes") as error:
        accel.validate_here(old.path)
    assert "accel adopt" in str(error.value)


def test_a_quantized_artifact_is_compared_with_the_float_answers(
    home: Path, tmp_path: Path, tiny_artifact: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tiny_artifact()
    quantized = quantize(parent, tmp_path / "int8", scheme="dynamic-int8")
    before, after = read_probes(parent), read_probes(quantized)
    assert before is not None
    assert after is not None
    expected = before.probes[0].calls[0].expected["logits"].values
    assert torch.equal(after.probes[0].calls[0].expected["logits"].values, expected)
    assert before.measured["model/logits"].rms < 1e-4 < after.measured["model/logits"].rms
    opened(quantized).close()
    changed_outputs(monkeypatch, lambda _, value: value * 1.2)
    with pytest.raises(ProbeError):
        opened(quantized, options=SessionOptions(graph_optimization="none"))


def _scaled_weight(model: ir.Model) -> None:
    weights = [
        v for v in model.graph.initializers.values() if v.const_value is not None and len(v.const_value.shape) == 2
    ]
    weight = max(weights, key=lambda v: v.const_value.size if v.const_value is not None else 0)
    assert weight.const_value is not None
    weight.const_value = ir.tensor(weight.const_value.numpy() * 1.01, name=weight.name)


def _swapped_rows(model: ir.Model) -> None:
    table = next(
        v for v in model.graph.initializers.values() if v.const_value is not None and v.const_value.shape[0] == 120
    )
    assert table.const_value is not None
    values = table.const_value.numpy().copy()
    values[[5, 6]] = values[[6, 5]]
    table.const_value = ir.tensor(values, name=table.name)


def _half_precision(model: ir.Model) -> None:
    for v in model.graph.initializers.values():
        if v.const_value is not None and len(v.const_value.shape) == 2 and v.const_value.dtype == ir.DataType.FLOAT:
            values = torch.from_numpy(v.const_value.numpy().copy()).to(torch.bfloat16).float().numpy()
            v.const_value = ir.tensor(values, name=v.name)


def _ignored_mask(model: ir.Model) -> None:
    graph = model.graph
    mask = next(value for value in graph.inputs if value.name == "attention_mask")
    ones = ir.node("Mul", [mask, ir.val("zero_mask", const_value=ir.tensor([0], name="zero_mask"))])
    add = ir.node("Add", [ones.outputs[0], ir.val("one_mask", const_value=ir.tensor([1], name="one_mask"))])
    for node in (ones, add):
        constant = node.inputs[1]
        assert constant is not None
        graph.register_initializer(constant)
    users = [(use.node, use.idx) for use in mask.uses() if use.node is not ones]
    for user, place in users:
        user.replace_input_with(place, add.outputs[0])
    graph.insert_before(graph[0], [ones, add])


@pytest.mark.parametrize("edit", [_scaled_weight, _swapped_rows, _half_precision, _ignored_mask])
def test_a_changed_graph_is_not_opened(
    edit: Callable[[ir.Model], None], home: Path, tmp_path: Path, tiny_artifact: Callable[..., Artifact]
) -> None:
    changed = plant(tiny_artifact().path, tmp_path / "changed", edit)
    with pytest.raises(ProbeError):
        opened(changed)


def test_a_foreign_folder_gets_probes(
    home: Path, tmp_path: Path, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = as_foreign(tiny_artifact().path, tmp_path / "foreign")
    result = CliRunner().invoke(app, ["adopt", str(folder), "--against", str(tiny_folder())])
    assert result.exit_code == 0, result.output
    assert "passed, and stored probes" in result.output
    assert not (folder / MANIFEST).exists()
    ORTModelForSequenceClassification.from_pretrained(folder)
    changed_outputs(monkeypatch, lambda _, value: value * 1.01)
    new_runtime(monkeypatch)
    with pytest.raises(ProbeError):
        ORTModelForSequenceClassification.from_pretrained(folder)


def test_a_wrong_folder_gets_no_probes(
    home: Path, tmp_path: Path, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    folder = as_foreign(tiny_artifact().path, tmp_path / "foreign")
    other = save_tiny(tmp_path / "other", "bert", "text-classification", seed=1)
    result = CliRunner().invoke(app, ["adopt", str(folder), "--against", str(other)])
    assert result.exit_code == 1
    assert not (folder / PROBES).exists()


def test_damaged_probes_are_an_error(home: Path, tmp_path: Path, tiny_artifact: Callable[..., Artifact]) -> None:
    shutil.copytree(tiny_artifact().path, tmp_path / "copy")
    (tmp_path / "copy" / PROBES).write_bytes(b"no probes")
    with pytest.raises(IntegrityError, match=r"probes\.safetensors is truncated or was changed"):
        Artifact.load(tmp_path / "copy")
    accepted = Artifact.accept_files(tmp_path / "copy")
    with pytest.raises(IntegrityError, match="The probes in .* cannot be read"):
        opened(accepted)


def test_validate_here_compares_without_the_model(
    tiny_artifact: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tiny_artifact().path)
    result = CliRunner().invoke(app, ["validate", folder, "--here", "--json"])
    assert result.exit_code == 0, result.output
    values: Mapping[str, Any] = json.loads(result.output)
    assert values["passed"]
    assert [output["output"] for output in values["outputs"]] == ["model/logits"]
    changed_outputs(monkeypatch, lambda _, value: value + 1)
    monkeypatch.setattr("accel.backends.probe_checks.cpu_flags", lambda: ("avx2",))
    result = CliRunner().invoke(app, ["validate", folder, "--here"])
    assert result.exit_code == 1
    assert "FAILED" in result.output
    assert "processor features" in result.output


def test_save_pretrained_keeps_the_probes(tmp_path: Path, tiny_artifact: Callable[..., Artifact]) -> None:
    ORTModelForSequenceClassification.from_pretrained(tiny_artifact().path).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / PROBES).read_bytes() == (tiny_artifact().path / PROBES).read_bytes()
    ORTModelForSequenceClassification.from_pretrained(tmp_path / "saved")


def test_another_tokenizer_is_not_opened(
    home: Path, tmp_path: Path, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    """A folder of another tool has no checksums. A tokenizer that was replaced in it is detected by its tokens."""
    folder = as_foreign(tiny_artifact().path, tmp_path / "foreign")
    accel.adopt(folder, against=tiny_folder())
    assert accel.pipeline("text-classification", str(folder))("my card")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["card"], vocabulary["here"] = vocabulary["here"], vocabulary["card"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ProbeError, match="splits texts differently"):
        accel.pipeline("text-classification", str(folder))


def test_a_tokenizer_changed_on_purpose_is_accepted(tmp_path: Path, tiny_artifact: Callable[..., Artifact]) -> None:
    shutil.copytree(tiny_artifact().path, tmp_path / "copy")
    file = tmp_path / "copy" / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["card"], vocabulary["here"] = vocabulary["here"], vocabulary["card"]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    accepted = Artifact.accept_files(tmp_path / "copy")
    assert accel.pipeline("text-classification", str(accepted.path))("my card")
    assert read_probes(accepted) is not None


def test_noise_is_the_same_on_every_machine() -> None:
    values = Noise((4,), -1.0, 2.0, 7).tensor()
    # Computed once with Python's integers.
    assert values.tolist() == pytest.approx(_python_noise(4, -1.0, 2.0, 7), abs=0)
    like = Noise.like(torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(0)), 1).tensor()
    assert abs(float(like.mean())) < 0.05
    assert abs(float(like.std()) - 1) < 0.05


def _python_noise(count: int, low: float, width: float, seed: int) -> list[float]:
    values = []
    for i in range(count):
        x = (i * 2654435761 + seed) % 2**32
        x = (x ^ (x >> 15)) * 2246822519 % 2**32
        x = (x ^ (x >> 13)) * 3266489917 % 2**32
        values.append(float(torch.tensor((x >> 8) / 2**24 * width + low, dtype=torch.float32)))
    return values


def test_the_processor_has_a_name() -> None:
    assert cpu_features.processor_name()
