"""Candidates of a search compared with the PyTorch that was measured beside them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from accel.measuring.latency.results import Cell, VariantResult
from accel.measuring.statistics import summarize
from accel.tuning.candidates import Candidate, Recipe
from accel.tuning.judging import Judge
from accel.tuning.report import Constraints, Goal
from accel.tuning.state import Tried


def measured(ms: float) -> VariantResult:
    calls = (ms,) * 8
    cell = Cell(
        workload="1x8", batch=1, sequence=8, latency=summarize(calls), throughput=1000 / ms, processor_ms=ms, ratio=None,
        milliseconds=(calls,),
    )  # fmt: skip
    return VariantResult(name="one", cells=(cell,))


def screened(name: str, search: str, *, ms: float, pytorch_ms: float) -> Tried:
    recipe = Recipe(stage="export", backend=name, format="onnx", setting="float32")
    candidate = Candidate(recipe=recipe, backend=name, device="cpu")
    return Tried(candidate, cast(Any, None), screen=measured(ms), anchor=measured(pytorch_ms), screened_in=search)


def test_what_an_earlier_search_measured_is_compared_with_its_own_pytorch() -> None:
    """The first search ran beside other programs, which made everything a hundred times slower, and was interrupted."""
    judge = Judge(Goal(objective="latency", constraints=Constraints()))
    tried = {
        "before": screened("before", "first", ms=200.0, pytorch_ms=400.0),
        "after": screened("after", "second", ms=1.0, pytorch_ms=4.0),
        "last": screened("last", "second", ms=8.0, pytorch_ms=4.0),
    }
    judge.tried.update(tried)
    assert {name: judge.speed(one) for name, one in tried.items()} == pytest.approx(
        {"before": 2.0, "after": 4.0, "last": 0.5}
    )
    assert [one.candidate.backend for one in judge.ranked()] == ["after", "before", "last"]


def test_within_a_search_all_are_compared_with_its_usual_pytorch() -> None:
    """Another program's work hit PyTorch in one heat alone."""
    judge = Judge(Goal(objective="latency", constraints=Constraints()))
    names = ("one", "two", "hit")
    for name in names:
        judge.tried[name] = screened(name, "first", ms=2.0, pytorch_ms=400.0 if name == "hit" else 4.0)
    assert [judge.speed(judge.tried[name]) for name in names] == pytest.approx([2.0, 2.0, 2.0])


def test_other_programs_are_noticed_by_pytorchs_own_latencies() -> None:
    """One processor of two was taken: PyTorch's threads waited for each other 60 times as long, other runtimes' did not."""
    judge = Judge(Goal(objective="latency", constraints=Constraints()))
    judge.tried["one"] = screened("one", "first", ms=1.0, pytorch_ms=3.0)
    judge.tried["two"] = screened("two", "first", ms=1.0, pytorch_ms=4.0)
    assert not judge.disturbed()
    judge.tried["one"].final, judge.tried["one"].final_anchor = measured(1.2), measured(172.0)
    assert "took 3 ms for 1x8 in one measurement and 172 ms in another" in judge.disturbed()
