"""Statistics of measurements: the bootstrap, a summary of latencies, and the speed-up with its confidence interval.

Every speed-up that accel prints or writes is a `SpeedupEstimate` computed by `speedup`, so that all tables show the same statistic of a
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
UNSTEADY = 2.0
"""Limit of the ratio of the upper to the lower interval end. Speed-ups above it are printed as `unsteady: LOW to HIGH`."""
NOISE = 0.02
"""Relative difference below which two speeds count as equal: two copies of one variant differ by 1.5 % (median of 20 benchmarks,
`benchmarks/tune.json`)."""
_CHUNK = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySummary:
    """Summary of latencies, in milliseconds.

    Attributes:
        calls: Number of calls.
        mean, sd, min, max, median: `sd` is the sample standard deviation.
        p95, p99: Percentiles, with linear interpolation.
    """

    calls: int
    mean: float
    sd: float
    min: float
    max: float
    median: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupEstimate:
    """Speed-up compared with the baseline, with its confidence interval.

    Attributes:
        value: The estimated speed-up; see `speedup`.
        low, high: Ends of the interval.
        confidence: Confidence level of the interval.
    """

    value: float
    low: float
    high: float
    confidence: float = 0.95

    @property
    def steady(self) -> bool:
        """Whether the interval is narrow enough (`UNSTEADY`) to print the estimate as one number."""
        return self.high <= UNSTEADY * self.low

    @property
    def equal(self) -> bool:
        """Whether the measurement shows no difference in speed: the interval includes 1, or the estimate is within `NOISE` of 1.

        Estimates further from 1 than the factor `UNSTEADY` are never equal, however wide the interval is.
        """
        distance = abs(math.log(self.value))
        if distance > math.log(UNSTEADY):
            return False
        return self.low <= 1.0 <= self.high or distance <= math.log1p(NOISE)

    def __str__(self) -> str:
        ends = f"{_decimals(self.low)} to {_decimals(self.high)}"
        return f"{_decimals(self.value)} ({ends})" if self.steady else f"unsteady: {ends}"


def _decimals(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "∞"


def bootstrap_interval(
    statistic: Callable[[np.ndarray], np.ndarray],
    size: int,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the percentile interval of a statistic, by resampling `size` observations with replacement.

    Args:
        statistic: Function from indices of resampled observations, `(samples, size) int64`, to values `(samples,)`; NaN values are
            ignored.
        size: Number of observations.
        confidence: Confidence level of the interval.
        resamples: Number of bootstrap samples.
        seed: Seed of the resampling.
    """
    generator = np.random.default_rng(seed)
    values = np.empty(resamples)
    # Compute the resamples in chunks, because the indices of all resamples of thousands of rows would need gigabytes of memory.
    for start in range(0, resamples, _CHUNK):
        part = values[start : start + _CHUNK]
        part[:] = statistic(generator.integers(0, size, (len(part), size)))
    outside = 0.5 - confidence / 2
    low, high = np.nanquantile(values, [outside, 1 - outside])
    return float(low), float(high)


def summarize(milliseconds: Sequence[float]) -> LatencySummary:
    """Return the summary of one or more latencies."""
    values = np.asarray(milliseconds, dtype=np.float64)
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return LatencySummary(
        calls=len(values),
        mean=float(values.mean()),
        sd=float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        min=float(values.min()),
        max=float(values.max()),
        median=float(p50),
        p95=float(p95),
        p99=float(p99),
    )


def speedup(
    baseline: Sequence[Sequence[float]],
    other: Sequence[Sequence[float]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> SpeedupEstimate:
    """Return the speed-up of a variant over the baseline with its 95 % interval, from costs measured in the same rounds.

    The estimate for one workload is the median over rounds of `baseline / other`; the estimate for several workloads is the geometric
    mean. All calls of a round share the same load of the machine. Therefore rounds are resampled, not calls, and both variants keep the
    same rounds. The number of rounds is small, so the interval is the expanded percentile interval.

    Args:
        baseline: Costs of the baseline: for each workload one number per round, such as the median latency of its calls.
        other: Costs of the variant, in the same form.
        resamples: Number of bootstrap samples.
        seed: Seed of the resampling.
    """
    # Use the median over rounds, because a single disturbed round hardly changes the median. In simulations with one disturbed round in
    # ten, these intervals contain the true value in 96 of 100 cases. Intervals of pooled medians contain it in 67 cases, and intervals of
    # means over rounds in 91 cases.
    logs = [np.log(np.asarray(a, float) / np.asarray(b, float)) for a, b in zip(baseline, other, strict=True)]
    value = math.exp(float(np.mean([np.median(ratios) for ratios in logs])))
    rounds = min(len(ratios) for ratios in logs)
    if rounds == 1:
        return SpeedupEstimate(value=value, low=0.0, high=math.inf)
    from scipy.special import ndtr, stdtrit  # imported only when needed, because the import takes half a second

    generator = np.random.default_rng(seed)
    # Workloads are measured one after the other, so their rounds are resampled independently.
    medians = [np.median(r[generator.integers(0, len(r), (resamples, len(r)))], axis=1) for r in logs]
    # Percentile intervals of few observations are too narrow. Widen them with the quantile of the expanded percentile interval
    # (Hesterberg, What Teachers Should Know About the Bootstrap, 2015, section 5.3).
    quantile = stdtrit(rounds - 1, 0.975)
    outside = ndtr(-math.sqrt(rounds / (rounds - 1)) * quantile)
    low, high = (float(end) for end in np.quantile(np.mean(medians, axis=0), [outside, 1 - outside]))
    return SpeedupEstimate(
        value=value,
        low=min(value, math.exp(low)),
        high=max(value, math.exp(high)),
    )
