"""Every way to load a model resolves the model once, selects its backend once, and opens each session once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import accel
from accel.artifact import Artifact
from accel.backends import plan, registry
from accel.cli import app
from accel.config import SessionOptions
from accel.measuring.latency.variants import Variant
from accel.measuring.latency.worker import _VariantServer
from accel.serving.engine import Engine
from accel.serving.worker_models import open_all
from accel.stages import checked_export as exporting
from accel.stages import resolution
from accel.testing.copies_without_manifest import edit_manifest

ONCE = {"resolved": 1, "chosen": 1, "opened": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder. The first test exports a model to this folder, and the other tests reuse the export."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch, home: Path) -> Counter[str]:
    """Return a counter of three events: a model was resolved, a backend was selected, and a session for many calls was
    opened.
    """
    counts: Counter[str] = Counter()
    monkeypatch.setenv("ACCEL_HOME", str(home))
    backend = type(registry.load(registry.describe("cpu")))

    def counted(owner: Any, name: str, event: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **named: Any) -> Any:
            # Do not count sessions for a few calls, because the validation of a new export opens one.
            if event != "opened" or not args[-1].few_calls:
                counts[event] += 1
            return real(*args, **named)

        monkeypatch.setattr(owner, name, call)

    def plan_of_check(*args: Any) -> plan.Plan:
        counts["chosen"] -= 1
        return plan.make_plan(*args)

    # The validation of a new export makes a separate plan, which is not counted.
    monkeypatch.setattr(exporting, "make_plan", plan_of_check)
    counted(resolution, "locate", "resolved")
    counted(plan, "select", "chosen")
    counted(backend, "open", "opened")
    return counts


@pytest.fixture
def measured(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> Path:
    """Return an artifact whose manifest contains run settings, as `accel tune` records them."""
    folder = Path(shutil.copytree(tiny_artifact().path, tmp_path / "measured"))
    run = {"backend": "cpu", "device": "cpu", "session": SessionOptions(threads=1, buckets=(8,)).to_dict()}
    edit_manifest(folder, lambda values: values.update(run=run))
    return folder


def loads(folder: Path) -> dict[str, Callable[[], Any]]:
    def benchmark() -> Any:
        return _VariantServer().load(Variant(name="one", path=folder, task="text-classification"), 1)

    def serve() -> None:
        with Engine(folder):
            pass

    return {
        "from_pretrained": lambda: accel.ORTModelForSequenceClassification.from_pretrained(folder),
        "from_pretrained of any task": lambda: accel.ORTModel.from_pretrained(folder),
        "pipeline": lambda: accel.pipeline("text-classification", str(folder)),
        "pipeline of the model's own task": lambda: accel.pipeline(model=str(folder)),
        "serve": serve,
        "benchmark": benchmark,
    }


@pytest.mark.parametrize("way", list(loads(Path())))
def test_artifact_is_opened_once(way: str, counts: Counter[str], tiny_artifact: Callable[..., Artifact]) -> None:
    folder = tiny_artifact().path
    counts.clear()
    loads(folder)[way]()
    assert counts == ONCE


@pytest.mark.parametrize("way", ["from_pretrained", "pipeline", "serve", "benchmark"])
def test_weights_are_exported_and_opened_once(way: str, counts: Counter[str], tiny_folder: Callable[..., Path]) -> None:
    loads(tiny_folder())[way]()
    assert counts == ONCE


def test_server_uses_recorded_settings_and_opens_once(counts: Counter[str], measured: Path) -> None:
    counts.clear()
    models = open_all(measured, workers=2)
    assert counts == {"resolved": 1, "chosen": 1, "opened": 2}
    for model in models:
        assert model.session_options == SessionOptions(threads=1, buckets=(8,), spinning=False)
        model.close()


def doctor(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.stdout


def test_doctor_shows_the_plan_of_an_artifact(measured: Path) -> None:
    code, text = doctor(str(measured))
    assert code == 0
    assert "runs on   cpu on cpu" in text
    assert "threads=1" in text
    assert "recorded in the manifest" in text
    assert "pytorch" in text, "every backend that was considered"
    plan = json.loads(doctor(str(measured), "--json")[1])
    assert (plan["backend"], plan["device"], plan["recorded"]) == ("cpu", "cpu", True)
    assert {row["backend"]: row["verdict"] for row in plan["considered"]}["cpu"] == "chosen"


def test_doctor_exports_nothing(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "empty"))
    code, text = doctor(str(tiny_folder()))
    assert code == 0
    assert "exported to onnx (float32) by cpu" in text
    assert not (tmp_path / "empty").exists()


def test_doctor_gives_the_reason_for_no_plan(measured: Path) -> None:
    code, text = doctor(str(measured), "--device", "cuda:7", "--json")
    assert code == 1
    plan = json.loads(text)
    assert plan["backend"] is None
    assert "cannot run this model" in plan["why_not"] or "can run this model" in plan["why_not"]
    assert doctor("--backend", "cpu")[0] == 2
