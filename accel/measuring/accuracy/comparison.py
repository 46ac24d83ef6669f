"""Compare two models' predictions on the same rows: the difference in a metric, with its confidence interval.

Metrics that are a fraction of correct rows use Tango's score interval for the difference of paired proportions and the exact
McNemar test. Tango's interval keeps its confidence level even when few or no rows differ between the models. All other metrics use
a paired bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from ..statistics import bootstrap_interval
from .metrics import LanguageModelPrediction, Metric, Values

RESAMPLES = 1000
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Scores and predictions of one model on a set of rows.

    Attributes:
        value: Value of the metric.
        scores: All scores that the metric returns, by name.
        predictions: One prediction for each row.
        seconds: Time to run the model over all rows, in seconds.
    """

    value: float
    scores: Mapping[str, float]
    predictions: tuple[Any, ...]
    seconds: float

    def __post_init__(self) -> None:
        # A search reads stored predictions from JSON, where tuples and `LanguageModelPrediction` are lists and dictionaries:
        # convert them back.
        object.__setattr__(self, "predictions", tuple(map(_prediction, self.predictions)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceInterval:
    """Confidence interval of the difference in a metric (second model minus first model).

    Attributes:
        low: Lower end.
        high: Upper end.
        confidence: Confidence level of the interval.
        method: Name of the statistical method.
        p_value: P-value of the hypothesis that both models are equally good; `None` if there is no exact test.
    """

    low: float
    high: float
    confidence: float
    method: str
    p_value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A model compared with another model on the same rows.

    `evaluate` reports it; the accuracy budget and `tune` use it for their decisions.

    Attributes:
        against: Name of the other model.
        own: Metric of the model.
        value: Metric of the other model.
        rows: Number of rows.
        difference: Metric of the model minus the metric of the other model.
        interval: Confidence interval of the difference.
        drop: Points of the metric that the model loses compared with the other model; negative if the model is better.
        drop_interval: Confidence interval of the drop, in points.
        agreement: Fraction of rows with the same prediction (for tagging and language models: fraction of tags or tokens); `None` if
            predictions are numbers.
    """

    against: str
    own: float
    value: float
    rows: int
    difference: float
    interval: ConfidenceInterval
    drop: float
    drop_interval: tuple[float, float]
    agreement: float | None

    def excess(self, max_drop: float) -> float:
        """Return by how many points the drop exceeds a budget; 0 if the drop is within the budget."""
        over = self.drop - max_drop
        return over if over > _EPSILON else 0.0

    def in_a_table(self) -> dict[str, Any]:
        """Return the fields of this comparison that the tables of searches show."""
        return {
            "value": self.own,
            "drop": self.drop,
            "drop_interval": self.drop_interval,
            "agreement": self.agreement,
        }


def _prediction(prediction: Any) -> Any:
    """Read a prediction from its JSON form."""
    if isinstance(prediction, Mapping):
        return LanguageModelPrediction(**{**prediction, "best": tuple(prediction["best"])})
    return prediction


def paired_proportions(first_only: int, second_only: int, rows: int, confidence: float = 0.95) -> ConfidenceInterval:
    """Return the difference of two models' fractions of correct rows, measured on the same rows, with its confidence interval.

    Tango, 1998, Equivalence test and confidence interval for the difference in proportions for the paired-sample
    design, Statistics in Medicine 17. The interval contains all differences that the score test does not reject.

    Args:
        first_only: Number of rows that only the first model predicts correctly.
        second_only: Number of rows that only the second model predicts correctly.
        rows: Number of all rows.
        confidence: Confidence level of the interval.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    difference = (second_only - first_only) / rows

    def score(delta: float) -> float:
        # The maximum-likelihood fraction of rows that only the first model predicts correctly, if the true difference is `delta`.
        b = -first_only - second_only + (2 * rows - second_only + first_only) * delta
        c = -first_only * delta * (1 - delta)
        share = (math.sqrt(max(b * b - 8 * rows * c, 0.0)) - b) / (4 * rows)
        variance = rows * (2 * share + delta * (1 - delta))
        return (second_only - first_only - rows * delta) / math.sqrt(variance) if variance > 0 else math.inf

    def end(inside: float, outside: float, limit: float) -> float:
        # `score` decreases with delta. 50 bisection steps are enough for 1e-9 points.
        for _ in range(50):
            middle = (inside + outside) / 2
            if abs(score(middle)) <= limit:
                inside = middle
            else:
                outside = middle
        return inside

    return ConfidenceInterval(
        low=end(difference, -1.0, z),
        high=end(difference, 1.0, z),
        confidence=confidence,
        method="score interval for paired proportions (Tango 1998), exact McNemar test",
        p_value=mcnemar(first_only, second_only),
    )


def mcnemar(first_only: int, second_only: int) -> float:
    """Return the p-value of the two-sided exact McNemar test, for rows that exactly one of two models predicts correctly."""
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
) -> ConfidenceInterval:
    """Return the confidence interval of the difference `second - first` of a metric, by bootstrap.

    Rows are resampled, and the metric of both models is computed on the same resampled rows. Takes milliseconds for metrics that are
    functions of sums, and `2 * resamples` computations of the metric for all others.
    """
    rows = len(references)
    if metric.sums is not None and metric.finish is not None:
        # Compute both models' vectors in one call, so that their columns are the same classes.
        joint = metric.row_sums([*first, *second], [*references, *references])
        a, b = joint[:rows], joint[rows:]
        finish = metric.finish

        def difference(picks: np.ndarray) -> np.ndarray:
            # `weights` is the number of times that each row was drawn, `(samples, rows)`.
            numbered = picks + rows * np.arange(len(picks))[:, None]
            weights = np.bincount(numbered.ravel(), minlength=picks.size).reshape(picks.shape).astype(np.float64)
            differences: np.ndarray = finish(weights @ b) - finish(weights @ a)
            return differences
    elif metric.resampled is not None:
        value, other = (metric.resampled(predictions, references) for predictions in (second, first))

        def difference(picks: np.ndarray) -> np.ndarray:
            weights = np.stack([np.bincount(pick, minlength=rows) for pick in picks]).astype(np.float64)
            # If no resampled row contains an object, both values are NaN: count their difference as 0.
            return np.nan_to_num(value(weights) - other(weights))
    else:

        def difference(picks: np.ndarray) -> np.ndarray:
            return np.array([_difference(metric, first, second, references, chosen) for chosen in picks])

    low, high = bootstrap_interval(difference, rows, confidence=confidence, resamples=resamples, seed=seed)
    return ConfidenceInterval(
        low=low, high=high, confidence=confidence, method=f"paired bootstrap, {resamples} resamples"
    )


def _difference(metric: Metric, first: Values, second: Values, references: Values, chosen: np.ndarray) -> float:
    """Return the difference `second - first` of a metric on the chosen rows."""
    true = [references[k] for k in chosen]
    values = [metric.compute([p[k] for k in chosen], true)[metric.key] for p in (first, second)]
    return values[1] - values[0]


def difference_interval(
    metric: Metric, first: Values, second: Values, references: Values, *, confidence: float = 0.95
) -> ConfidenceInterval:
    """Return the confidence interval that fits the metric: Tango's for fractions of correct rows, else the bootstrap interval."""
    if metric.rowwise and metric.sums is not None:
        a = metric.row_sums(first, references)[:, 0] > 0
        b = metric.row_sums(second, references)[:, 0] > 0
        return paired_proportions(int((a & ~b).sum()), int((b & ~a).sum()), len(references), confidence)
    return bootstrap(metric, first, second, references, confidence=confidence)


def compare(
    metric: Metric,
    first: ScoredRows,
    second: ScoredRows,
    references: Values,
    *,
    against: str,
    agreement: float | None,
    confidence: float = 0.95,
) -> Comparison:
    """Compare a model's scores (`second`) with the scores of the model named `against` (`first`)."""
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
