"""Tests that a search measures accuracy under the conditions of its workload: with its number of rows per call, and
with the options of the candidate.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from accel.artifact.json_reading import build
from accel.config import SessionOptions
from accel.data.encoded_rows import EncodedRows
from accel.errors import ConfigError
from accel.measuring.accuracy.comparison import Comparison, ConfidenceInterval, ScoredRows
from accel.measuring.accuracy.evaluation import EvaluationData, rows_a_call
from accel.measuring.latency.variants import Variant
from accel.measuring.latency.workloads import WorkloadSettings
from accel.tuning import jobs
from accel.tuning.candidates import Candidate, Recipe
from accel.tuning.grader import AccuracyGrader
from accel.tuning.jobs import Accuracy
from accel.tuning.search_data import SearchSubject, TriedCandidate

DATA = EvaluationData(data=[{"text": "a", "label": 0}])
LOAD = WorkloadSettings(batch=(4, 1), sequence=(8,), texts=None, max_length=None, threads=1, seed=0)


def scored(value: float, batch_size: int, drop: float | None = None) -> Accuracy:
    comparison = None
    if drop is not None:
        interval = ConfidenceInterval(low=0.0, high=0.0, confidence=0.95, method="")
        comparison = Comparison(
            against="PyTorch float32", own=value, value=0.95, rows=1, difference=0.0, interval=interval, drop=drop,
            drop_interval=(0.0, 0.0), agreement=1.0,
        )  # fmt: skip
    return Accuracy(
        metric="accuracy", higher_is_better=True, scored=ScoredRows(value=value, scores={}, predictions=(), seconds=2.0),
        rows=1, data={}, comparison=comparison, batch_size=batch_size,
    )  # fmt: skip


class FakeBuilder:
    """Builder that returns fixed results and records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def start(self, *args: Any) -> Future[Any]:
        self.asked.append(args)
        done: Future[Any] = Future()
        done.set_result(scored(0.95, 4))
        return done

    def call(self, *args: Any) -> Any:
        self.asked.append(args)
        return scored(0.94, 1, drop=1.0)

    def files(self, artifact: Any) -> None: ...


class NoStore:
    """Store that stores nothing."""

    def get(self, kind: str, key: Any) -> None: ...

    def put(self, kind: str, key: Any, value: Any) -> None: ...


def test_accuracy_is_measured_with_batch_and_options_of_the_workload() -> None:
    subject = SearchSubject(
        model=cast(Any, type("Model", (), {"task": "text-classification", "hub": type("Hub", (), {"trust_remote_code": False})})),
        baseline=Variant(name="PyTorch", path=Path(), task="text-classification"), digest="", machine={}, versions={},
    )  # fmt: skip
    builder = FakeBuilder()
    grader = AccuracyGrader(subject, DATA, cast(Any, NoStore()), cast(Any, builder), LOAD)
    grader.begin()
    recipe = Recipe(stage="quantize", backend="cpu", format="onnx", setting="dynamic-int8")
    candidate = Candidate(recipe=recipe, backend="cpu", device="cpu", options=SessionOptions(buckets=(8, 16)))
    built = cast(
        Any, type("BuiltArtifact", (), {"path": Path(), "recipe": recipe, "facts": type("Facts", (), {"digest": "a"})})
    )
    tried = TriedCandidate(candidate, built)
    grader.grade(tried)
    (_, _, data, _), (_, variant, _, _, sizes) = builder.asked
    assert data.batch_size == 4
    assert sizes == grader.batch_sizes == (1, 4)
    assert (variant.options.buckets, variant.options.threads) == ((8, 16), 1)


def test_largest_drop_of_several_batch_sizes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {1: scored(0.94, 1, drop=1.0), 4: scored(0.92, 4, drop=3.0), 8: scored(0.93, 8, drop=2.0)}

    class Prepared:
        def __init__(self, data: EvaluationData, model: Any, **named: Any) -> None:
            self.batch_size = data.batch_size

    artifact = SimpleNamespace(path=Path())
    model = SimpleNamespace(artifact=artifact, config=None, close=lambda: None)
    monkeypatch.setattr(jobs, "EvaluationSet", Prepared)
    monkeypatch.setattr(jobs, "planned_variant", lambda variant: None)
    monkeypatch.setattr(jobs.ORTModel, "from_plan", lambda plan: model)
    monkeypatch.setattr(jobs, "_scored", lambda model, data, *args: answers[data.batch_size])
    variant = Variant(name="one", path=Path(), task="text-classification")
    accuracy = jobs.accuracy(variant, DATA, None, (1, 4, 8))
    assert (accuracy.batch_size, accuracy.scored.value, accuracy.scored.seconds) == (4, 0.92, 6.0)
    assert accuracy.by_batch == {"1": 0.94, "4": 0.92, "8": 0.93}
    assert build(Accuracy, json.loads(json.dumps(asdict(accuracy))), "A saved accuracy result") == accuracy


def test_rows_keep_their_order_if_by_length_is_false() -> None:
    encoded = EncodedRows(tokens={"input_ids": [[1] * 5, [1], [1] * 3, [1]]}, padding={"input_ids": 0})
    assert encoded.plan(2) == [[1, 3], [2, 0]]
    assert encoded.plan(2, by_length=False) == [[0, 1], [2, 3]]
    without_padding = EncodedRows(tokens={"input_ids": [[1] * 5, [1], [1] * 3, [1]]})
    assert without_padding.plan(2, by_length=False) == [[1, 3], [2], [0]], "unequal lengths cannot share a call"


def test_rows_per_call_as_text() -> None:
    assert [rows_a_call(sizes) for sizes in ([1], [32], (1, 8))] == [
        "1 row a call",
        "32 rows a call",
        "1 and 8 rows a call",
    ]


@pytest.mark.parametrize("batch", [(), (0,)])
def test_invalid_batch_size_raises(batch: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="batch is"):
        WorkloadSettings(batch=batch, sequence=(8,), texts=None, max_length=None, threads=None, seed=0)
