"""Tests of `accel tune`: plugins take part through their entry point, a crash rejects one candidate, and a second run
continues the first run.
"""

from __future__ import annotations

import copy
import csv
import json
import pickle
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel import ORTModelForSequenceClassification, evaluate, tune
from accel.artifact import cache
from accel.backends import registry
from accel.errors import BudgetError, ConfigError, InputError, OutputFolderError
from accel.measuring.report import html_page
from accel.testing.models import save_tiny
from accel.tuning import timer
from accel.tuning.store import ResultStore
from accel.tuning.trials import TuningResult, render

TEMPLATE = Path(__file__).parents[2] / "examples" / "plugin_template" / "accel_toy"

# This backend crashes the whole process when it opens a graph.
CRASH = """
import os
from accel.interfaces.specs import BackendSpec, Capability, DeviceSpec, Probe

SPEC = BackendSpec(
    name="crash", summary="dies", extra="crash", impl="accel_crash:Crash",
    capabilities=(Capability(stage="run", consumes="torch_program"),),
)

class Crash:
    def probe(self): return Probe(devices=(DeviceSpec("cpu"),))
    def exporter(self): return None
    def optimizer(self): return None
    def quantizer(self): return None
    def open(self, artifact, request): os._exit(3)
"""


def _clear() -> None:
    for cached in (registry.probe, registry._describe, registry._instance):
        cached.cache_clear()


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install two third-party plugins with entry points."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(TEMPLATE, site / "accel_toy")
    (site / "accel_crash.py").write_text(CRASH)
    for name, value in (("toy", "accel_toy:SPEC"), ("crash", "accel_crash:SPEC")):
        info = site / f"accel_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: accel-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[accel.backends]\n{name} = {value}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        _clear()
        yield
    _clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "bert")


@pytest.fixture(scope="module")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = random.Random(0)
    labels = list(
        json.loads((model / "config.json").read_text()).get("id2label", {"0": "LABEL_0", "1": "LABEL_1"}).values()
    )
    file = tmp_path_factory.mktemp("data") / "rows.csv"
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "label"])
        for _ in range(40):
            words = generator.choices("the a of hello world good bad".split(), k=generator.randint(2, 9))
            writer.writerow([" ".join(words), generator.choice(labels)])
    return file


HOW = {"sequence": [8], "backends": ["toy", "crash"], "threads": 1}


@pytest.fixture(scope="module")
def tuning(plugins: None, model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> TuningResult:
    return tune(model, tmp_path_factory.mktemp("out") / "tuned", data=str(data), max_drop=5.0, **HOW)


@pytest.mark.thorough
def test_plugin_is_a_candidate_by_its_entry_point(tuning: TuningResult) -> None:
    names = [trial.name for trial in tuning.trials]
    assert "toy: torch_program float32" in names
    assert tuning.winner.backend == "toy"
    assert tuning.winner.value == tuning.reference, "float32 on another runtime answers as PyTorch does"
    assert tuning.rows == 40
    assert tuning.front[0].winner or tuning.front


def test_tuning_result_is_pickled_and_copied(tuning: TuningResult) -> None:
    for other in (pickle.loads(pickle.dumps(tuning)), copy.deepcopy(tuning)):
        assert str(other) == str(tuning)


def test_crash_rejects_one_candidate(tuning: TuningResult) -> None:
    (crashed,) = [trial for trial in tuning.trials if trial.name == "crash: torch_program float32"]
    assert "ended unexpectedly (exit code 3)" in crashed.reason


def test_every_rejected_candidate_is_explained(tuning: TuningResult) -> None:
    assert sum(trial.winner for trial in tuning.trials) == 1
    assert all(trial.reason for trial in tuning.trials if not trial.winner)
    page = html_page(tuning.to_dict())
    assert "Rejected candidates" in page
    assert "Latency against accuracy" in page


def test_winner_runs_with_the_measured_settings(tuning: TuningResult) -> None:
    run = tuning.artifact.manifest.run
    assert run is not None
    assert run.measured["drop"] == tuning.winner.drop
    assert run.measured["rows"] == 40
    assert (run.measured["batch_size"], run.measured["by_length"]) == (1, True)
    assert tuning.winner.speedup is not None
    assert run.measured["speedup"]["value"] == tuning.winner.speed == tuning.winner.speedup.value
    loaded = ORTModelForSequenceClassification.from_pretrained(tuning.artifact.path)
    assert loaded.backend == "toy"
    assert loaded._opened.options.to_dict() == dict(tuning.winner.options)
    written = json.loads((tuning.artifact.path / "tune.json").read_text())
    assert written["winner"] == tuning.winner.name
    assert written["accuracy"] == {"batch_size": [1], "by_length": True}
    assert written["disturbance"]["signs"] == list(tuning.disturbance.signs) == run.measured["disturbed"]
    (trial,) = [record for record in written["trials"] if record["winner"]]
    (variant,) = [record for record in written["variants"] if record["name"] == tuning.winner.name]
    assert trial["speedup"]["value"] == variant["cells"][0]["ratio"]["value"] == run.measured["speedup"]["value"]
    assert evaluate(tuning.artifact, [{"text": "good", "label": "LABEL_0"}]).batch_size == 1
    assert "on 40 rows, 1 row a call" in " ".join(render(tuning).split())


def test_second_run_measures_nothing_again(
    tuning: TuningResult, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("nothing may be loaded again")

    # Leave out the crashing plugin, because the search tries a crashed candidate again: the machine may have caused the
    # crash.
    how = {**HOW, "backends": ["toy"]}
    monkeypatch.setattr("accel.tuning.timer.VariantProcess", refuse)
    again = tune(model, tmp_path / "again", data=str(data), max_drop=5.0, **how)
    assert again.winner.name == tuning.winner.name
    assert again.winner.value == tuning.winner.value
    assert again.resumed > 0


def test_error_names_the_binding_constraint(tuning: TuningResult, model: Path, data: Path, tmp_path: Path) -> None:
    how = {**HOW, "backends": ["toy"]}
    with pytest.raises(
        BudgetError, match=r"max_size_mb 0\.001: violated by all candidates; the closest misses it by"
    ) as info:
        tune(model, tmp_path / "none", data=str(data), max_drop=5.0, max_size_mb=0.001, **how)
    assert "max_drop 5" in str(info.value)
    assert list(tmp_path.iterdir()) == []


def test_data_without_labels_is_refused(model: Path, plugins: None, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\nhello world\n")
    with pytest.raises(InputError):
        tune(model, tmp_path / "out", data=str(tmp_path / "rows.csv"), **HOW)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"), [({"objective": "speed"}, "objective"), ({"max_drop": -1.0}, "max_drop")]
)
def test_invalid_settings_raise(model: Path, data: Path, tmp_path: Path, settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        tune(model, tmp_path / "out", data=str(data), **settings)


def test_too_short_time_limit_raises_soon(
    model: Path, data: Path, plugins: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    started = time.perf_counter()
    with pytest.raises(BudgetError, match=r"time limit of 0\.5 s"):
        tune(model, tmp_path / "out", data=str(data), time_limit_s=0.5, **HOW)
    # The limit of 20 s allows for the time limit of 0.5 s and for ending the processes.
    assert time.perf_counter() - started < 20
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("slow_kind", ["timing", "timing the winner"])
def test_short_measurements_are_used_at_the_time_limit(
    slow_kind: str, tuning: TuningResult, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heat = timer.CandidateTimer._heat

    def late(self: timer.CandidateTimer, group: Any, amount: Any, kind: str) -> Any:
        if kind == slow_kind:
            return None
        return heat(self, group, amount, kind)

    # Use a different seed. Otherwise the search would use stored results instead of new measurements.
    how = {**HOW, "backends": ["toy"], "seed": 7}
    monkeypatch.setattr(timer.CandidateTimer, "_heat", late)
    again = tune(model, tmp_path / "again", data=str(data), max_drop=5.0, **how)
    assert again.winner.backend == "toy"
    assert again.artifact.manifest.run is not None


def test_subset_of_rows_is_reported(tuning: TuningResult) -> None:
    assert (tuning.rows, tuning.total_rows, tuning.measured_on) == (40, 40, "40 rows")
    assert replace(tuning, rows=10).measured_on == "10 of 40 rows"
    assert set(tuning.to_dict()["stages"]) >= {"export", "screen", "measure accuracy", "time survivors"}


def test_searches_lock_a_shared_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If two searches need the same artifact, only one search builds it. An artifact that a search uses is not removed."""
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    first_store, second_store = ResultStore(), ResultStore()
    with first_store.in_use():
        with first_store.alone() as alone:
            assert alone
        with second_store.in_use(), first_store.alone() as alone:
            assert not alone
        with first_store.building({"a": 1}, 0.0) as first, second_store.building({"a": 1}, 0.1) as second:
            assert (first, second) == (True, False)
        with second_store.building({"a": 1}, 0.0) as again:
            assert again
    with second_store.alone() as alone:
        assert alone


def test_results_of_a_running_search_are_not_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    store = ResultStore()
    with store.in_use():
        store.put("screens", {"a": 1}, {"found": 1})
        assert cache.clear() == []
        with pytest.raises(OutputFolderError, match="running search"):
            cache.clear("tune")
        assert store.get("screens", {"a": 1}) == {"found": 1}
    assert [entry.name for entry in cache.clear("tune")] == ["tune"]
    assert store.get("screens", {"a": 1}) is None


def test_fresh_store_ignores_old_results_and_stores_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    ResultStore().put("screens", {"a": 1}, {"found": 1})
    fresh = ResultStore(fresh=True)
    assert fresh.get("screens", {"a": 1}) is None
    fresh.put("screens", {"a": 1}, {"found": 2})
    assert fresh.get("screens", {"a": 1}) == {"found": 2}


@pytest.mark.thorough
def test_interrupted_search_keeps_its_results(
    tuning: TuningResult, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel.tuning.search import Search

    home = tmp_path / "home"
    monkeypatch.setenv("ACCEL_HOME", str(home))

    def interrupt(self: Search, *args: object, **named: object) -> None:
        raise KeyboardInterrupt

    how = {**HOW, "backends": ["toy"]}
    with monkeypatch.context() as patch:
        patch.setattr(Search, "_screen", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune(model, tmp_path / "out", data=str(data), **how)
    assert not (tmp_path / "out").exists()
    assert len(list((home / "tune" / "accuracy").glob("*.json"))) == 1
    assert len(list((home / "tune" / "builds").glob("*.json"))) == 1
