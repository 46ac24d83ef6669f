"""Tests that a search compares each candidate with the float32 PyTorch baseline that the same search measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from accel.config import SessionOptions
from accel.measuring.accuracy.comparison import ScoredRows
from accel.measuring.disturbance import Disturbance
from accel.measuring.latency.results import Cell, VariantResult
from accel.measuring.statistics import summarize
from accel.tuning.candidates import Candidate, Recipe
from accel.tuning.jobs import Accuracy, ArtifactFacts
from accel.tuning.objective import CandidateComparison
from accel.tuning.search_data import BuiltArtifact, Measurement, TriedCandidate
from accel.tuning.trials import Constraints, Goal


def measured(ms: float) -> VariantResult:
    calls = (ms,) * 8
    cell = Cell(
        workload="1x8", batch=1, sequence=8, latency=summarize(calls), throughput=1000 / ms, processor_ms=ms, ratio=None,
        milliseconds=(calls,), round_seconds=(8 * ms / 1000,), round_processor_seconds=(8 * ms / 1000,),
    )  # fmt: skip
    return VariantResult(name="one", cells=(cell,))


def measurement_of(result: VariantResult, anchor: VariantResult, search: str = "") -> Measurement:
    return Measurement(result=result, anchor=anchor, search=search)


def screened(name: str, search: str, *, ms: float, pytorch_ms: float) -> TriedCandidate:
    recipe = Recipe(stage="export", backend=name, format="onnx", setting="float32")
    candidate = Candidate(recipe=recipe, backend=name, device="cpu")
    return TriedCandidate(candidate, cast(Any, None), screen=measurement_of(measured(ms), measured(pytorch_ms), search))


def test_earlier_results_use_the_baseline_of_their_search() -> None:
    """Each result is compared with the baseline of its own search. In this test, other programs made everything in the
    first search a hundred times slower, and the search was interrupted.
    """
    judge = CandidateComparison(Goal(objective="latency", constraints=Constraints()))
    tried = {
        "before": screened("before", "first", ms=200.0, pytorch_ms=400.0),
        "after": screened("after", "second", ms=1.0, pytorch_ms=4.0),
        "last": screened("last", "second", ms=8.0, pytorch_ms=4.0),
    }
    judge.tried.update(tried)
    assert {name: judge.speed(candidate) for name, candidate in tried.items()} == pytest.approx(
        {"before": 2.0, "after": 4.0, "last": 0.5}
    )
    assert [candidate.candidate.backend for candidate in judge.ranked()] == ["after", "before", "last"]


def test_candidates_use_the_median_baseline_of_their_search() -> None:
    """A candidate is compared with the median baseline of its search. In this test, another program slowed PyTorch in
    only one round.
    """
    judge = CandidateComparison(Goal(objective="latency", constraints=Constraints()))
    names = ("one", "two", "hit")
    for name in names:
        judge.tried[name] = screened(name, "first", ms=2.0, pytorch_ms=400.0 if name == "hit" else 4.0)
    assert [judge.speed(judge.tried[name]) for name in names] == pytest.approx([2.0, 2.0, 2.0])


def test_other_programs_are_detected_by_pytorch_latencies() -> None:
    """Another program that uses one of two processors is detected: PyTorch's latency is about 60 times longer in one
    measurement than in an earlier measurement, and the candidate's latency is nearly unchanged.
    """
    judge = CandidateComparison(Goal(objective="latency", constraints=Constraints()))
    judge.tried["one"] = screened("one", "first", ms=1.0, pytorch_ms=3.0)
    judge.tried["two"] = screened("two", "first", ms=1.0, pytorch_ms=4.0)
    assert not judge.disturbed()
    judge.tried["one"].final = measurement_of(measured(1.2), measured(172.0))
    assert "took 3 ms for 1x8 in one measurement and 172 ms in another" in judge.disturbed()


EXPORT = Recipe(stage="export", backend="cpu", format="onnx", setting="float32")
INT8 = Recipe(stage="quantize", backend="cpu", format="onnx", setting="dynamic-int8", parent=EXPORT)
PYTORCH = [4.0, 4.1, 4.0, 3.9, 4.0, 4.2, 3.8, 4.0, 4.0, 4.1, 3.9, 4.0]


def rounds(times: list[float]) -> VariantResult:
    calls = tuple((ms,) * 5 for ms in times)
    seconds = tuple(5 * ms / 1000 for ms in times)
    cell = Cell(
        workload="1x16", batch=1, sequence=16, latency=summarize(times), throughput=1.0, processor_ms=1.0, ratio=None,
        milliseconds=calls, round_seconds=seconds, round_processor_seconds=seconds,
    )  # fmt: skip
    return VariantResult(name="one", cells=(cell,))


def survivor(recipe: Recipe, times: list[float], anchor: list[float] = PYTORCH, **options: Any) -> TriedCandidate:
    candidate = Candidate(recipe=recipe, backend="cpu", device="cpu", options=SessionOptions(**options))
    comparison = cast(Any, SimpleNamespace(excess=lambda budget: 0.0, in_a_table=dict))
    scored = ScoredRows(value=0.9, scores={}, predictions=(), seconds=1.0)
    accuracy = Accuracy(
        metric="accuracy", higher_is_better=True, scored=scored, rows=10, data={}, comparison=comparison, batch_size=1,
        by_batch={"1": 0.9},
    )  # fmt: skip
    built = BuiltArtifact(
        recipe, Path(), ArtifactFacts(digest="", bytes=1, dtype="float32", limits={}, masked=True, seconds=1.0)
    )
    measurement = measurement_of(rounds(times), rounds(anchor))
    return TriedCandidate(candidate, built, screen=measurement, final=measurement, accuracy=accuracy)


def judged(*group: TriedCandidate, objective: Any = "latency") -> CandidateComparison:
    judge = CandidateComparison(Goal(objective=objective, constraints=Constraints()))
    judge.tried.update({str(candidate.candidate): candidate for candidate in group})
    return judge


NOISE = [1.02, 0.97, 1.0, 0.98, 1.01, 0.96, 0.99, 0.97, 1.03, 0.98, 0.97, 1.01]


def winner_and_reasons(*group: TriedCandidate, objective: Any = "latency") -> tuple[str, dict[str, str]]:
    judge = judged(*group, objective=objective)
    winner = judge.best(judge.finals())
    assert winner is not None
    trials = judge.trials(winner, {}, cast(Any, SimpleNamespace(skipped=[])))
    return str(winner.candidate), {trial.name: trial.reason for trial in trials}


@pytest.mark.parametrize("objective", ["latency", "throughput", "cost"])
def test_run_option_does_not_win_by_noise(objective: Any) -> None:
    plain, buckets = survivor(EXPORT, [1.0] * 12), survivor(EXPORT, NOISE, buckets=(8, 16))
    name, reasons = winner_and_reasons(plain, buckets, objective=objective)
    assert name == "cpu: onnx float32"
    assert "but the winner is simpler" in reasons["cpu: onnx float32 (buckets 8,16)"]


def test_float_wins_if_int8_is_not_faster() -> None:
    plain, int8 = survivor(EXPORT, [1.0] * 12, threads=1), survivor(INT8, NOISE)
    assert winner_and_reasons(int8, plain)[0] == "cpu: onnx float32 (threads 1)"


def test_clearly_faster_candidate_wins() -> None:
    plain, int8 = survivor(EXPORT, [1.0] * 12), survivor(INT8, [ms / 1.2 for ms in NOISE], buckets=(8,))
    name, reasons = winner_and_reasons(plain, int8)
    assert "dynamic-int8" in name
    assert reasons["cpu: onnx float32"].startswith("it meets the constraints, but the winner is 1.2")


def test_very_different_candidates_are_not_equal() -> None:
    wild = [0.2, 40.0, 3.0, 0.3, 9.0, 0.1, 5.0, 3.0, 8.0, 0.5, 3.0, 4.0]
    plain, int8 = survivor(EXPORT, wild), survivor(INT8, [1.0] * 12)
    assert "dynamic-int8" in winner_and_reasons(plain, int8)[0]


def test_candidates_of_different_searches_use_their_baselines() -> None:
    """Finalists of different searches are compared relative to their baselines. In this test, the machine was ten times
    slower during the earlier search.
    """
    before = survivor(INT8, [10.0 * ms for ms in NOISE], [10 * ms for ms in PYTORCH])
    now = survivor(EXPORT, [1.0] * 12)
    assert judged(before, now).advantage(before, now).equal
    assert winner_and_reasons(before, now)[0] == "cpu: onnx float32"


def test_speedup_of_a_measurement_is_the_same_everywhere() -> None:
    """All reports show the same speedup for a measurement. An earlier version printed 10.2 and wrote 16.1 to its file."""
    plain = survivor(EXPORT, [1.0] * 12, [4.0] * 6 + [40.0] * 6)
    judge = judged(plain)
    (trial,) = judge.trials(plain, {}, cast(Any, SimpleNamespace(skipped=[])))
    assert trial.speedup is not None
    assert trial.speed == trial.speedup.value
    assert not trial.speedup.steady
    plain.final = measurement_of(rounds([1.0] * 12), rounds([16.0] * 12))
    again = judge.measured_again(trial, plain)
    assert again.speedup is not None
    assert (again.speed, again.result) == (again.speedup.value, plain.final.result)
    assert again.speed == pytest.approx(16.0)


def test_size_ratios_have_exact_intervals() -> None:
    judge = judged(objective="size")
    small = survivor(INT8, [1.0] * 12)
    result = rounds([1.0] * 12)
    small.final = measurement_of(replace(result, bytes=25), replace(result, bytes=100))
    assert str(judge.speedup(small)) == "4.00 (4.00 to 4.00)"


def test_result_of_a_search_reports_other_programs() -> None:
    plain = survivor(EXPORT, [1.0] * 12)
    signs = ("the load average was 7.0 on 2 processors before the measurement",)
    plain.final = replace(plain.last, disturbance=Disturbance(signs=signs))
    judge = judged(plain)
    assert judge.disturbance(plain).signs == signs
    plain.final = replace(plain.last, anchor=rounds([400.0] * 12))
    assert len(judge.disturbance(plain).signs) == 2
