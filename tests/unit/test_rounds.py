"""Tests of measurements in rounds: the variants take turns, including a variant that is too slow and a variant whose
process dies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel.measuring.latency import rounds
from accel.measuring.latency.rounds import MeasuredVariant, restart, warm_up
from accel.measuring.latency.variants import CallTimings, Variant, Workload
from accel.measuring.processes import WorkerLostError
from accel.measuring.report import text_table

WORK = Workload(name="1x8", batch=1, sequence=8, cases=({},))


class FakeWorker:
    """Worker that immediately reports calls with a fixed duration. It never returns from a call that would take longer
    than `never`.
    """

    def __init__(self, milliseconds: float, *, never: float = 1e9, dies: bool = False) -> None:
        self.milliseconds, self.never, self.dies, self.calls = milliseconds, never, dies, 0

    def prepare(self, workload: Workload) -> None: ...

    def time(
        self, workload: str, calls: int, first: int = 0, traffic: Any = None, timeout_s: float = 600.0
    ) -> CallTimings:
        if self.dies:
            raise WorkerLostError("it died")
        if self.calls and self.milliseconds > self.never:
            raise WorkerLostError("no answer", late=True)
        self.calls += calls
        return CallTimings((self.milliseconds,) * calls, calls * self.milliseconds / 1000, 0.0)

    def hang_up(self) -> None: ...

    def close(self) -> None: ...


def measured(name: str, worker: FakeWorker) -> MeasuredVariant:
    return MeasuredVariant(Variant(name=name, path=Path(), task="text-classification"), worker)  # type: ignore[arg-type]


def group(*workers: FakeWorker) -> list[MeasuredVariant]:
    return [measured(str(place), worker) for place, worker in enumerate((FakeWorker(10.0), *workers))]


def test_too_slow_variant_is_stopped_after_a_few_calls() -> None:
    fast, slow = FakeWorker(5.0), FakeWorker(40.0)
    variants = group(fast, slow)
    warm_up(variants, WORK, 6, hopeless=3.0)
    assert variants[1].error is None
    assert fast.calls == 8, "one that may compile, one that decides, six to warm up"
    assert (
        variants[2].error
        == "too slow to be timed: one call takes 40 ms or more, and a call of the baseline takes 10 ms (workload 1x8)"
    )
    assert slow.calls == 4
    assert not variants[2].lost, "it would be as slow the next time"


def test_short_calls_are_timed_even_if_much_slower() -> None:
    variants = group(FakeWorker(29.0))
    warm_up(variants, WORK, 6, hopeless=1.5)
    assert variants[1].error is None


def test_call_that_does_not_end_is_stopped() -> None:
    variants = group(FakeWorker(10_000.0, never=1000.0))
    warm_up(variants, WORK, 6, hopeless=3.0)
    assert (
        variants[1].error
        == "too slow to be timed: one call takes 1030 ms or more, and a call of the baseline takes 10 ms (workload 1x8)"
    )
    assert not variants[1].lost


def test_terminated_process_is_lost() -> None:
    variants = group(FakeWorker(5.0, dies=True))
    warm_up(variants, WORK, 6, hopeless=3.0)
    assert variants[1].lost


def test_running_variants_get_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    restarted: list[str] = []

    def start(variant: Variant, threads: int | None) -> FakeWorker:
        restarted.append(variant.name)
        return FakeWorker(5.0)

    monkeypatch.setattr(rounds, "VariantProcess", start)
    monkeypatch.setattr(FakeWorker, "load", lambda self: None, raising=False)
    variants = group(FakeWorker(5.0), FakeWorker(5.0))
    variants[1].fail("it was too far off")
    warmup_s, before = variants[0].warmup_s, variants[0].worker
    restart(variants, [WORK], 6, backwards=True)
    assert restarted == ["2", "0"]
    assert variants[1].worker is None
    assert variants[0].worker is not before
    assert variants[0].warmup_s == warmup_s


def test_without_limit_every_variant_is_warmed_up() -> None:
    slow = FakeWorker(40.0)
    variants = group(slow)
    warm_up(variants, WORK, 6)
    assert (variants[1].error, slow.calls) == (None, 6)


@pytest.mark.parametrize(("rate", "reported"), [(200.0, True), (100.0, False), (None, False)])
def test_saturated_variants_are_reported(rate: float | None, reported: bool) -> None:
    cell = {"workload": "1x8", "batch": 1, "latency": {"median": 9.0, "p95": 10.0}, "ratio": None, "throughput": 100.0}
    variant = {
        "name": "slow one",
        "compute_dtype": "float32",
        "peak_memory_bytes": None,
        "bytes": None,
        "cells": [cell],
    }
    settings = {"threads": 2, "callers": 1, "rate": rate}
    values = {"task": "text-classification", "baseline": "slow one", "settings": settings, "variants": [variant]}
    assert ("slow one finished only 100 of 200 calls per second" in text_table(values)) is reported


def test_variant_names_with_brackets_are_shown() -> None:
    latency = {"median": 1.0, "p95": 2.0}
    cell = {"workload": "1x8", "batch": 1, "latency": latency, "throughput": 1.0, "ratio": None}
    variant = {"name": "int8 [cpu]", "cells": [cell], "peak_memory_bytes": None, "bytes": None, "compute_dtype": "int8"}
    values = {"task": "t", "baseline": "b", "settings": {"threads": 1}, "variants": [variant]}
    assert "int8 [cpu]" in text_table(values)
