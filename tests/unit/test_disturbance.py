"""Tests of reports about measurements that other programs disturbed. The timings are invented."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from accel.measuring import disturbance as module
from accel.measuring.disturbance import Disturbance, MachineWatch, disturbance
from accel.measuring.latency.results import BenchmarkResult, Cell, VariantResult, result
from accel.measuring.latency.rounds import MeasuredVariant
from accel.measuring.latency.variants import CallTimings, Variant, Workload
from accel.measuring.report import html_page, text_table

WORK = Workload(name="1x8", batch=1, sequence=8, cases=({},))
QUIET = [10.0, 10.1, 10.2, 9.9, 10.0, 10.3, 9.8, 10.0]
# In the second half of these timings, another program used the processor.
HIT = [10.0, 10.1, 10.2, 9.9, 600.0, 900.0, 500.0, 700.0]


def measured(name: str, rounds: list[float]) -> MeasuredVariant:
    variant = MeasuredVariant(Variant(name=name, path=Path(), task="text-classification"))
    variant.blocks["1x8"] = [CallTimings((ms,) * 5, 5 * ms / 1000, 5 * ms / 1000) for ms in rounds]
    return variant


def benchmark(
    baseline: list[float], other: list[float], measured_disturbance: Disturbance | None = None
) -> BenchmarkResult:
    base, fast = measured("PyTorch", baseline), measured("fast", other)
    results: tuple[VariantResult, ...] = (result(base, base, [WORK]), result(fast, base, [WORK]))
    return BenchmarkResult(
        task="text-classification", baseline="PyTorch", machine={}, settings={"threads": 2}, variants=results, seconds=1.0,
        disturbance=measured_disturbance or disturbance({"1x8": results[0].cells[0].round_ms}),
    )  # fmt: skip


def test_undisturbed_machine_has_no_signs() -> None:
    verdict = disturbance({"1x8": QUIET}, load_average=0.4, processors=2, steal=0.01)
    assert (verdict.signs, verdict.disturbed) == ((), False)
    assert verdict.spread == pytest.approx(1.04, abs=0.01)


def test_each_sign_is_reported() -> None:
    (spread,) = disturbance({"1x8": HIT, "1x16": QUIET}).signs
    assert spread == "rounds of the baseline took 9.97 to 760 ms for 1x8"
    (load,) = disturbance({}, load_average=6.2, processors=2).signs
    assert load == "the load average was 6.2 on 2 processors before the measurement"
    (steal,) = disturbance({}, steal=0.2).signs
    assert steal == "the hypervisor gave 20 % of the processor time to other machines"


def test_load_and_steal_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([(10, 1000), (110, 1200)])
    monkeypatch.setattr(module, "_processor_time", lambda: next(ticks))
    monkeypatch.setattr(os, "getloadavg", lambda: (7.0, 0.0, 0.0), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    verdict = MachineWatch().judge({"1x8": QUIET})
    assert (verdict.load_average, verdict.steal, len(verdict.signs)) == (7.0, 0.5, 2)


def test_rounds_are_judged_without_load_average_and_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getloadavg", raising=False)
    monkeypatch.setattr(module, "_processor_time", lambda: None)
    verdict = MachineWatch().judge({"1x8": HIT})
    assert (verdict.load_average, verdict.steal) == (None, None)
    assert verdict.disturbed


def test_disturbance_is_reported_in_table_page_and_json() -> None:
    quiet, hit = benchmark(QUIET, [1.0] * 8).to_dict(), benchmark(HIT, [1.0] * 8).to_dict()
    line = "Other programs disturbed these measurements: rounds of the baseline took"
    for text in (text_table(quiet), html_page(quiet)):
        assert line not in text
    for text in (text_table(hit), html_page(hit)):
        assert line in text
    assert json.loads(json.dumps(hit))["disturbance"]["signs"]
    assert list(quiet["disturbance"]["signs"]) == []


def test_disturbed_speedup_is_reported_as_unsteady() -> None:
    """A speedup with a very wide interval is printed as unsteady. A search once reported 658 times PyTorch's speed,
    with an interval from 43 to 668.
    """
    text = text_table(benchmark(HIT, [1.0] * 8).to_dict())
    assert "unsteady: 10.00 to 765.53" in text
    assert "10.00 (9.90 to 10.20)" in text_table(benchmark(QUIET, [1.0] * 8).to_dict())


def test_single_round_is_reported_as_unsteady() -> None:
    values = benchmark([10.0], [1.0]).to_dict()
    json.dumps(values, allow_nan=False)
    assert "unsteady: 0.00 to ∞" in text_table(values)
    assert "unsteady: 0.00 to ∞" in html_page(values)


def test_cells_keep_the_time_of_each_round() -> None:
    cell = benchmark(QUIET, [1.0] * 8)["fast"].cells[0]
    assert isinstance(cell, Cell)
    assert cell.round_ms == [1.0] * 8
    assert cell.round_seconds == cell.round_processor_seconds == (0.005,) * 8
