"""How far two models' predictions on the same rows are apart in a metric, and how sure that is.

For metrics that are a share of right rows: Tango's score interval for the difference of paired proportions, which holds
its level for few discordant rows and even for none, and the exact McNemar test. For the rest: a paired bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from ..statistics import bootstrap_interval
from .metrics import Metric, TokenScores, Values

RESAMPLES = 1000
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One model's scores and predictions on a set of rows.

    Attributes:
        value: The metric.
        scores: All that the metric returns.
        predictions: One a row.
        seconds: For running the model over the rows.
    """

    value: float
    scores: Mapping[str, float]
    predictions: tuple[Any, ...]
    seconds: float

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Scored:
        """From `dataclasses.asdict` and JSON."""
        return cls(**{**values, "predictions": tuple(_restored(one) for one in values["predictions"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A difference in a metric (second minus first) and what is known about it.

    Attributes:
        low: Lower end.
        high: Upper end.
        confidence: Of the interval.
        method: How it was computed.
        p_value: Of the hypothesis that both are equally good, where there is an exact test.
    """

    low: float
    high: float
    confidence: float
    method: str
    p_value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A model and the one that it is compared with, on the same rows: what `evaluate` reports, and what a budget and `tune` judge
    by.

    Attributes:
        against: What the model is compared with.
        own: The model's metric.
        value: The other's metric.
        rows: On how many rows.
        difference: The model's metric minus the other's.
        interval: Confidence interval of the difference.
        drop: Points of the metric that the model loses against the other; negative when it is better.
        drop_interval: Confidence interval of the drop, in points.
        agreement: Share of rows (of tags and tokens: of them) with the same prediction; `None` where predictions are numbers.
    """

    against: str
    own: float
    value: float
    rows: int
    difference: float
    interval: Interval
    drop: float
    drop_interval: tuple[float, float]
    agreement: float | None

    def excess(self, max_drop: float) -> float:
        """Points by which the drop is above a budget; 0 inside it."""
        over = self.drop - max_drop
        return over if over > _EPSILON else 0.0

    def in_a_table(self) -> dict[str, Any]:
        """What the tables of searches show of it."""
        return {
            "value": self.own,
            "drop": self.drop,
            "drop_interval": self.drop_interval,
            "agreement": self.agreement,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Comparison:
        """From `dataclasses.asdict` and JSON."""
        low, high = values["drop_interval"]
        return cls(**{**values, "interval": Interval(**values["interval"]), "drop_interval": (low, high)})


def _restored(prediction: Any) -> Any:
    """A prediction as it was before it became JSON."""
    if isinstance(prediction, Mapping):
        return TokenScores(**{**prediction, "best": tuple(prediction["best"])})
    return prediction


def paired_proportions(first_only: int, second_only: int, rows: int, confidence: float = 0.95) -> Interval:
    """The difference of two shares of right rows, measured on the same rows.

    Tango, 1998, Equivalence test and confidence interval for the difference in proportions for the paired-sample
    design, Statistics in Medicine 17: all differences that the score test does not reject.

    Args:
        first_only: Rows that only the first got right.
        second_only: Rows that only the second got right.
        rows: All rows.
        confidence: Of the interval.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    difference = (second_only - first_only) / rows

    def score(delta: float) -> float:
        # The maximum-likelihood share of rows that only the first got right, given the difference `delta`.
        b = -first_only - second_only + (2 * rows - second_only + first_only) * delta
        c = -first_only * delta * (1 - delta)
        share = (math.sqrt(max(b * b - 8 * rows * c, 0.0)) - b) / (4 * rows)
        variance = rows * (2 * share + delta * (1 - delta))
        return (second_only - first_only - rows * delta) / math.sqrt(variance) if variance > 0 else math.inf

    def end(inside: float, outside: float, limit: float) -> float:
        # `score` falls in delta; bisection to 1e-9 of a point.
        for _ in range(50):
            middle = (inside + outside) / 2
            if abs(score(middle)) <= limit:
                inside = middle
            else:
                outside = middle
        return inside

    return Interval(
        low=end(difference, -1.0, z),
        high=end(difference, 1.0, z),
        confidence=confidence,
        method="score interval for paired proportions (Tango 1998), exact McNemar test",
        p_value=mcnemar(first_only, second_only),
    )


def mcnemar(first_only: int, second_only: int) -> float:
    """Two-sided exact McNemar test: how likely discordant rows are at least this lopsided by chance."""
    discordant = first_only + second_only
    if discordant == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(first_only, discordant).pvalue)


def bootstrap(
    metric: Metric,
    first: Values,
    second: Values,
    references: Values,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The difference `second - first` of a metric, by resampling rows; both are measured on the same rows each time.

    Milliseconds for metrics that are functions of sums; otherwise `2 * resamples` computations of the metric.
    """
    rows = len(references)
    if metric.sums is not None and metric.finish is not None:
        # One vector a row for both, over the same classes.
        joint = metric.sums([*first, *second], [*references, *references])
        a, b = joint[:rows], joint[rows:]
        finish = metric.finish

        def difference(picks: np.ndarray) -> np.ndarray:
            # How often each row was drawn, `(samples, rows)`.
            numbered = picks + rows * np.arange(len(picks))[:, None]
            weights = np.bincount(numbered.ravel(), minlength=picks.size).reshape(picks.shape).astype(np.float64)
            found: np.ndarray = finish(weights @ b) - finish(weights @ a)
            return found
    elif metric.resampled is not None:
        value, other = (metric.resampled(one, references) for one in (second, first))

        def difference(picks: np.ndarray) -> np.ndarray:
            weights = np.stack([np.bincount(one, minlength=rows) for one in picks]).astype(np.float64)
            # Rows without any object have no value, and no difference.
            return np.nan_to_num(value(weights) - other(weights))
    else:

        def difference(picks: np.ndarray) -> np.ndarray:
            return np.array([_difference(metric, first, second, references, chosen) for chosen in picks])

    low, high = bootstrap_interval(difference, rows, confidence=confidence, resamples=resamples, seed=seed)
    return Interval(low=low, high=high, confidence=confidence, method=f"paired bootstrap, {resamples} resamples")


def _difference(metric: Metric, first: Values, second: Values, references: Values, chosen: np.ndarray) -> float:
    """`second - first` of a metric on the chosen rows."""
    true = [references[k] for k in chosen]
    values = [metric.compute([p[k] for k in chosen], true)[metric.key] for p in (first, second)]
    return values[1] - values[0]


def difference_interval(
    metric: Metric, first: Values, second: Values, references: Values, *, confidence: float = 0.95
) -> Interval:
    """The interval that fits the metric."""
    if metric.rowwise and metric.sums is not None:
        a = metric.sums(first, references)[:, 0] > 0
        b = metric.sums(second, references)[:, 0] > 0
        return paired_proportions(int((a & ~b).sum()), int((b & ~a).sum()), len(references), confidence)
    return bootstrap(metric, first, second, references, confidence=confidence)


def compare(
    metric: Metric,
    first: Scored,
    second: Scored,
    references: Values,
    *,
    against: str,
    agreement: float | None,
    confidence: float = 0.95,
) -> Comparison:
    """What a model scored (`second`) beside what the one called `against` did (`first`)."""
    interval = difference_interval(metric, first.predictions, second.predictions, references, confidence=confidence)
    low, high = sorted(metric.drop(0.0, end) for end in (interval.low, interval.high))
    return Comparison(
        against=against,
        own=second.value,
        value=first.value,
        rows=len(references),
        difference=second.value - first.value,
        interval=interval,
        drop=metric.drop(first.value, second.value),
        drop_interval=(low, high),
        agreement=agreement,
    )
