"""Tests of the clock that divides the time limit of a search among its stages."""

from __future__ import annotations

import math
import time

import pytest

from accel.tuning.search_data import TimeBudget


def test_no_limit_gives_infinite_time() -> None:
    clock = TimeBudget(limit_s=None)
    assert (clock.left(), clock.until(0.3), clock.timeout()) == (math.inf, 1.0, None)


def test_stage_gets_a_share_of_the_remaining_time() -> None:
    late = TimeBudget(limit_s=100.0, started=time.perf_counter() - 60)
    share = late.until(0.5)
    assert share == pytest.approx(0.8, abs=0.01)
    assert late.left(share) == pytest.approx(20, abs=1)
    assert late.timeout(share) == pytest.approx(20, abs=1)


def test_after_the_limit_a_process_has_a_moment_to_answer() -> None:
    over = TimeBudget(limit_s=10.0, started=time.perf_counter() - 60)
    assert over.left() < 0
    assert over.timeout() == 0.1
    assert over.until(0.5) > 1


def test_reserved_time_is_not_divided() -> None:
    late = TimeBudget(limit_s=100.0, started=time.perf_counter() - 60)
    late.keep(10.0)
    assert late.left(late.until(1.0)) == pytest.approx(30, abs=1)
    late.keep(1000.0)
    assert late.left(late.until(1.0)) == pytest.approx(20, abs=1)
