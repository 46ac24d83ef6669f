"""Statistics of measurements: the bootstrap, a summary of latencies, and the speed-up with its interval.

Every speed-up that accel prints or writes is a `Ratio` made by `speedup`, so that two tables never show two statistics of one
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
UNSTEADY = 2.0
"""A ratio whose interval ends are further apart than this factor is printed as `unsteady: LOW to HIGH`."""
NOISE = 0.02
"""Two things whose speeds differ by less than this share are equally fast: two copies of one variant differ by 1.5 % (median of 20
benchmarks, `benchmarks/tune.json`)."""
_CHUNK = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Latencies in milliseconds.

    Attributes:
        calls: How many.
        mean, sd, min, max, median: Of them; `sd` is the sample's.
        p95, p99: Percentiles, linear between neighbours.
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
class Ratio:
    """How many times faster than the baseline, with the interval of that estimate.

    Attributes:
        value: The estimate; see `speedup`.
        low, high: Ends of the interval.
        confidence: Of the interval.
    """

    value: float
    low: float
    high: float
    confidence: float = 0.95

    @property
    def steady(self) -> bool:
        """Whether the interval is narrow enough (`UNSTEADY`) for the estimate to be quoted as one number."""
        return self.high <= UNSTEADY * self.low

    @property
    def equal(self) -> bool:
        """Whether neither side is shown to be faster: the interval includes 1, or the estimate is within `NOISE` of it.

        Estimates further from 1 than `UNSTEADY` are never equal, however wide the interval is.
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
    """The percentile interval of a statistic of `size` observations that are drawn again with replacement.

    Args:
        statistic: From which were drawn, `(samples, size) int64`, to its values `(samples,)`; those that are NaN do not count.
        size: Number of observations.
        confidence: Of the interval.
        resamples: How often all are drawn.
        seed: Of the drawing.
    """
    generator = np.random.default_rng(seed)
    values = np.empty(resamples)
    # In parts: all the drawings of thousands of rows at once would take gigabytes.
    for start in range(0, resamples, _CHUNK):
        part = values[start : start + _CHUNK]
        part[:] = statistic(generator.integers(0, size, (len(part), size)))
    outside = 0.5 - confidence / 2
    low, high = np.nanquantile(values, [outside, 1 - outside])
    return float(low), float(high)


def summarize(milliseconds: Sequence[float]) -> Summary:
    """The summary of at least one latency."""
    values = np.asarray(milliseconds, dtype=np.float64)
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return Summary(
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
) -> Ratio:
    """Return how many times faster than the baseline something is, with the 95 % interval, from costs in the same rounds.

    The estimate of one workload is the median over rounds of `baseline / other`; several workloads count alike (geometric mean).
    Calls of one round share what else the machine was doing then, so rounds are resampled and not calls, and both sides keep the
    same rounds. There are few of them, so the interval is the expanded one.

    Args:
        baseline: Costs of the baseline: for each workload one number a round, such as the median latency of its calls.
        other: The same of the other one.
        resamples: Bootstrap samples.
        seed: Of the resampling.
    """
    if not baseline or len(baseline) != len(other):
        raise ValueError(f"{len(baseline)} workloads against {len(other)}")
    for a, b in zip(baseline, other, strict=True):
        if len(a) != len(b) or not a:
            raise ValueError(f"{len(a)} rounds against {len(b)}")
    # The median over rounds, which a round that another program disturbed does not move. On simulated rounds, one in ten of
    # them disturbed, such intervals cover in 96 of 100 cases; around the pooled medians it was 67, with means 91.
    logs = [np.log(np.asarray(a, float) / np.asarray(b, float)) for a, b in zip(baseline, other, strict=True)]
    value = math.exp(float(np.mean([np.median(one) for one in logs])))
    rounds = min(len(one) for one in logs)
    if rounds == 1:
        return Ratio(value=value, low=0.0, high=math.inf)
    from scipy.special import ndtr, stdtrit  # half a second to import

    generator = np.random.default_rng(seed)
    # Workloads are measured one after the other: their rounds are resampled independently.
    medians = [np.median(one[generator.integers(0, len(one), (resamples, len(one)))], axis=1) for one in logs]
    # Percentiles of a bootstrap of few observations are too narrow. This share outside widens them: the expanded percentile
    # interval (Hesterberg, What Teachers Should Know About the Bootstrap, 2015, section 5.3).
    quantile = stdtrit(rounds - 1, 0.975)
    outside = ndtr(-math.sqrt(rounds / (rounds - 1)) * quantile)
    low, high = (float(end) for end in np.quantile(np.mean(medians, axis=0), [outside, 1 - outside]))
    return Ratio(
        value=value,
        low=min(value, math.exp(low)),
        high=max(value, math.exp(high)),
    )


def ratio(
    baseline: Sequence[Sequence[float]],
    other: Sequence[Sequence[float]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Ratio:
    """The speed-up by the latencies of one workload, a list of calls for each round; see `speedup`."""
    if len(baseline) != len(other) or not baseline:
        raise ValueError(f"{len(baseline)} rounds against {len(other)}")
    costs = ([float(np.median(calls)) for calls in side] for side in (baseline, other))
    first, second = ([side] for side in costs)
    return speedup(first, second, resamples=resamples, seed=seed)


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios or of latencies of different sizes."""
    return math.exp(sum(math.log(v) for v in values) / len(values))
