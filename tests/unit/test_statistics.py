"""Tests of summaries of latencies, and of ratios with confidence intervals."""

from __future__ import annotations

import numpy as np
import pytest

from accel.measuring.statistics import SpeedupEstimate, bootstrap_interval, speedup, summarize


def test_summary_of_known_numbers() -> None:
    summary = summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (summary.calls, summary.mean, summary.min, summary.max, summary.median) == (5, 22.0, 1.0, 100.0, 3.0)
    assert summary.sd == pytest.approx(43.6176, abs=1e-3)
    assert summary.p95 == pytest.approx(80.8)
    assert summary.p99 == pytest.approx(96.16)


def test_summary_of_one_call_has_no_spread() -> None:
    assert summarize([2.5]).sd == 0.0


def test_bootstrap_of_a_mean_agrees_with_the_normal_interval() -> None:
    values = np.random.default_rng(0).normal(3, 2, 400)
    low, high = bootstrap_interval(lambda picks: values[picks].mean(axis=1), len(values), resamples=4000)
    error = 1.96 * values.std(ddof=1) / len(values) ** 0.5
    # With 4,000 resamples, the ends of the interval are accurate to about 4 % of its width.
    assert (low, high) == pytest.approx((values.mean() - error, values.mean() + error), abs=0.08 * error)


def _rounds(generator: np.random.Generator, drift: np.ndarray, scale: float) -> list[list[float]]:
    """Return simulated measurements of one workload: for each round, the median time of 20 calls."""
    return [[float(np.median(scale * d * generator.lognormal(0, 0.05, 20))) for d in drift]]


def test_ratio_ignores_a_drift_of_both_variants() -> None:
    generator = np.random.default_rng(0)
    drift = generator.lognormal(0, 0.5, 12)
    ratio = speedup(_rounds(generator, drift, 3.0), _rounds(generator, drift, 1.0))
    assert ratio.low < 3.0 < ratio.high
    assert ratio.high / ratio.low < 1.6, "rounds are paired: their drift is not in the interval's width"


def test_interval_of_equal_variants_covers_one() -> None:
    covered = 0
    for seed in range(200):
        generator = np.random.default_rng(seed)
        drift = generator.lognormal(0, 0.1, 12)
        # In each process, some rounds are randomly faster or slower, and one round in ten is disturbed.
        a, b = (
            _rounds(generator, drift * generator.lognormal(0, 0.02, 12) * (1 + (generator.random(12) < 0.1) / 2), 1.0)
            for _ in range(2)
        )
        ratio = speedup(a, b, resamples=500, seed=seed)
        covered += ratio.low <= 1.0 <= ratio.high
    assert covered >= 184, "a 95 % interval covers in about 190 of 200; 184 is 3 standard deviations below 0.95"


def test_single_round_has_an_infinite_interval() -> None:
    ratio = speedup([[2.0]], [[1.0]])
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 0.0, float("inf"))


def test_estimate_and_interval_use_the_same_statistic() -> None:
    """The estimate and its interval use the same statistic. In this test, other programs slowed five of twelve baseline
    rounds by a factor of 50, so the ratio of pooled medians differs from the median ratio of rounds.
    """
    base = [10.0] * 7 + [500.0] * 5
    # The second variant was slowed in the same five rounds and in two more rounds.
    other = [1.0] * 5 + [50.0] * 7
    ratio = speedup([base], [other])
    assert ratio.value == pytest.approx(10.0), "pooled medians say 10 / 50"
    assert ratio.low <= ratio.value <= ratio.high


def test_speedup_of_several_workloads_is_their_geometric_mean() -> None:
    ratio = speedup([[2.0, 2.0, 2.0], [8.0, 8.0]], [[1.0, 1.0, 1.0], [1.0, 1.0]])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((4.0, 4.0, 4.0))


def test_workloads_must_have_pairs() -> None:
    with pytest.raises(ValueError, match="zip"):
        speedup([[1.0]], [[1.0], [1.0]])


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (SpeedupEstimate(value=3.708, low=3.521, high=3.9), "3.71 (3.52 to 3.90)"),
        (SpeedupEstimate(value=658.0, low=43.0, high=668.0), "unsteady: 43.00 to 668.00"),
        (SpeedupEstimate(value=2.0, low=0.0, high=float("inf")), "unsteady: 0.00 to ∞"),
    ],
)
def test_ratio_is_shown_with_interval_or_as_unsteady(ratio: SpeedupEstimate, text: str) -> None:
    assert str(ratio) == text


@pytest.mark.parametrize(
    ("value", "low", "high", "equal"),
    [
        (1.05, 0.97, 1.12, True),  # the interval includes 1
        (1.005, 1.002, 1.008, True),  # smaller than the difference between processes of the same variant
        (1.08, 1.03, 1.12, False),
        (0.9, 0.85, 0.95, False),
        (5.0, 0.9, 9.0, False),  # too far from 1, although the interval is wide
    ],
)
def test_equally_fast(value: float, low: float, high: float, equal: bool) -> None:
    assert SpeedupEstimate(value=value, low=low, high=high).equal is equal
