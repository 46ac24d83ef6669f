"""Metrics by the names of the `evaluate` library.

Those that several tasks share are here, on scikit-learn and SciPy, so that they work offline and fast; any other name, or the path of a
metric script, goes to `evaluate` where it is installed and the script can be reached. Values are on the scale that
`evaluate` gives them: fractions, except `squad`'s percentages.

For a confidence interval a metric is written as a function of sums over rows: `sums` returns one vector a row, `finish`
turns their sum into the value. A resampled value is then one matrix product away (`comparing.bootstrap`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, did_you_mean

Floats = npt.NDArray[np.float64]
Values = Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A measure of predictions against references.

    Attributes:
        name: As the user called it.
        key: Which of the scores is the value.
        compute: Predictions and references to scores by name.
        sums: Predictions and references to one vector a row: `(rows, k)`, dense or sparse; `None` where the metric is no function of
            sums, or not known to be one.
        finish: Sums over rows `(..., k)` to values `(...)`.
        resampled: For metrics that are no function of sums: predictions and references to a function from how often each row
            counts `(samples, rows)` to values `(samples,)`.
        rowwise: Whether it is the mean of a 0 or 1 for each row, which `sums` returns first.
        points: What turns a difference into points: 100 for fractions, 1 for percentages.
        higher_is_better: `False` for errors.
    """

    name: str
    key: str
    compute: Callable[[Values, Values], Mapping[str, float]]
    sums: Callable[[Values, Values], Any] | None = None
    finish: Callable[[Floats], Floats] | None = None
    resampled: Callable[[Values, Values], Callable[[Floats], Floats]] | None = None
    rowwise: bool = False
    points: float = 100.0
    higher_is_better: bool = True

    def drop(self, reference: float, value: float) -> float:
        """By how many points `value` is worse than `reference`; negative when it is better."""
        difference = reference - value if self.higher_is_better else value - reference
        return difference * self.points


# Classes: predictions and references are class numbers.


def _accuracy(predictions: Values, references: Values) -> dict[str, float]:
    return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


def _correct(predictions: Values, references: Values) -> Floats:
    right = (np.asarray(predictions) == np.asarray(references)).astype(np.float64)
    return np.stack([right, np.ones_like(right)], axis=1)


def ratio(sums: Floats) -> Floats:
    """The first of two sums over the second, 0 where that is 0."""
    return divide(sums[..., 0], sums[..., 1])


def divide(numerator: Floats, denominator: Floats) -> Floats:
    """The quotient, 0 where the denominator is 0, as scikit-learn counts it."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)


def _class_sums(predictions: Values, references: Values) -> Any:
    """For each row and class whether it was hit, predicted and true: `(rows, 3 * classes)`, sparse."""
    from scipy.sparse import coo_array

    found, true = np.asarray(predictions), np.asarray(references)
    classes = np.union1d(np.union1d(found, true), [0, 1])  # 1 is the positive class of binary averages
    a, b = np.searchsorted(classes, found), np.searchsorted(classes, true)
    hits, rows, count = np.flatnonzero(a == b), np.arange(len(found)), len(classes)
    places = np.concatenate([hits, rows, rows]), np.concatenate([a[hits], count + a, 2 * count + b])
    shape = (len(found), 3 * count)
    return coo_array((np.ones(len(places[0])), places), shape=shape).tocsr()


def _averaged(which: str, average: str) -> Callable[[Floats], Floats]:
    def finish(sums: Floats) -> Floats:
        hits, predicted, true = np.split(sums, 3, axis=-1)
        if average == "micro":
            hits, predicted, true = (part.sum(-1, keepdims=True) for part in (hits, predicted, true))
        if average == "binary":
            hits, predicted, true = (part[..., 1:2] for part in (hits, predicted, true))
        below = {"f1": (predicted + true) / 2, "precision": predicted, "recall": true}[which]
        values = divide(hits, below)
        if average == "weighted":
            return divide((values * true).sum(-1), true.sum(-1))
        # Classes that are neither true nor predicted do not count.
        present = (predicted + true) > 0
        return divide((values * present).sum(-1), present.sum(-1).astype(np.float64))

    return finish


def _by_sklearn(which: str, average: str) -> Callable[[Values, Values], dict[str, float]]:
    def compute(predictions: Values, references: Values) -> dict[str, float]:
        from sklearn import metrics

        function = {"f1": metrics.f1_score, "precision": metrics.precision_score, "recall": metrics.recall_score}[which]
        return {which: float(function(references, predictions, average=average, zero_division=0))}

    return compute


def _matthews(predictions: Values, references: Values) -> dict[str, float]:
    from sklearn.metrics import matthews_corrcoef

    return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}


def _matthews_finish(sums: Floats) -> Floats:
    # Gorodkin (2004): correlation of the one-hot predictions and labels.
    hits, predicted, true = np.split(sums, 3, axis=-1)
    rows, correct = true.sum(-1), hits.sum(-1)
    covariance = correct * rows - (predicted * true).sum(-1)
    spread = (rows**2 - (predicted**2).sum(-1)) * (rows**2 - (true**2).sum(-1))
    return divide(covariance, np.sqrt(spread))


def class_metrics(classes: int) -> dict[str, Metric]:
    """Metrics of class numbers by name. `f1`, `precision` and `recall` are those of class 1 for two classes and macro averages for more."""
    made = {
        "accuracy": Metric(
            name="accuracy", key="accuracy", compute=_accuracy, sums=_correct, finish=ratio, rowwise=True
        )
    }
    usual = "binary" if classes == 2 else "macro"
    averages = {"": usual, "_macro": "macro", "_micro": "micro", "_weighted": "weighted"}
    for which in ("f1", "precision", "recall"):
        for suffix, average in averages.items():
            made[which + suffix] = Metric(
                name=which + suffix, key=which, compute=_by_sklearn(which, average), sums=_class_sums,
                finish=_averaged(which, average),
            )  # fmt: skip
    name = "matthews_correlation"
    return {**made, name: Metric(name=name, key=name, compute=_matthews, sums=_class_sums, finish=_matthews_finish)}


# Numbers: regression, similarity.


def correlation(which: str) -> Metric:
    """The correlation of numbers: `spearmanr` or `pearsonr`."""

    def compute(predictions: Values, references: Values) -> dict[str, float]:
        from scipy import stats

        found, true = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
        if len(found) < 2 or np.ptp(found) == 0 or np.ptp(true) == 0:
            return {which: float("nan")}  # nothing varies
        function = stats.spearmanr if which == "spearmanr" else stats.pearsonr
        return {which: float(function(found, true)[0])}

    if which == "spearmanr":
        return Metric(name=which, key=which, compute=compute)
    return Metric(name=which, key=which, compute=compute, sums=_moments, finish=_pearson_finish)


def _moments(predictions: Values, references: Values) -> Floats:
    found, true = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    # Centred first: the sums of squares would lose digits otherwise.
    found, true = found - found.mean(), true - true.mean()
    return np.stack([np.ones_like(found), found, true, found * found, true * true, found * true], axis=1)


def _pearson_finish(sums: Floats) -> Floats:
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    return divide(n * xy - x * y, np.sqrt(np.maximum((n * xx - x * x) * (n * yy - y * y), 0)))


# Texts: of language models, predictions are `TokenScores`, and the rows themselves are the references.


@dataclass(frozen=True, slots=True)
class TokenScores:
    """How well a language model predicted the tokens of a row.

    Attributes:
        loss: Sum of the negative log likelihoods, in nats.
        tokens: How many were predicted.
        best: The likeliest token at each place.
    """

    loss: float
    tokens: int
    best: tuple[int, ...]


def edits(found: Sequence[str], true: Sequence[str]) -> int:
    """Insertions, removals and replacements between two sequences (Levenshtein, 1966)."""
    row = list(range(len(found) + 1))
    for i, wanted in enumerate(true, start=1):
        before, row[0] = row[0], i
        for j, have in enumerate(found, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (wanted != have))
    return row[-1]


SYNONYMS = {
    "miou": "mean_iou",
    "map@50": "map_50",
    "spearman": "spearmanr",
    "pearson": "pearsonr",
    "mcc": "matthews_correlation",
    "em": "exact_match",
}
"""Other words for names of metrics."""


def through_evaluate(name: str, known: Sequence[str], trust_remote_code: bool) -> Metric:
    """A metric script, from a path or from the Hub.

    Raises:
        ConfigError: `evaluate` is not installed, or the script cannot be had.
    """
    hint = f"use one of {', '.join(known)}" if known else "use another metric"
    script = Path(name).expanduser().exists()
    if "/" in name and not script and not trust_remote_code:
        raise ConfigError(
            f"{name!r} is a script of a Hub user, which would run here.", fix=f"{hint}, or pass trust_remote_code=True."
        )
    try:
        import evaluate
    except ImportError as error:
        raise ConfigError(
            f"{name!r} is not a metric that accel has.{did_you_mean(name, [*known, *SYNONYMS])}",
            fix=f'{hint}, or install the evaluate library: pip install "accel-transformers[evaluate]".',
        ) from error
    try:
        loaded = evaluate.load(str(Path(name).expanduser()) if script else name)
    # A script is foreign code, and an unreachable Hub fails in several ways.
    except Exception as error:
        raise ConfigError(
            f"The metric {name!r} cannot be loaded: {str(error).splitlines()[0] if str(error) else type(error).__name__}."
            f"{did_you_mean(name, [*known, *SYNONYMS])}",
            fix=f"{hint}, which work offline; or give the path of a metric script.",
        ) from error

    def compute(predictions: Values, references: Values) -> dict[str, float]:
        scores = loaded.compute(predictions=list(predictions), references=list(references)) or {}
        numbers = {key: float(value) for key, value in scores.items() if np.ndim(value) == 0}
        if not numbers:
            raise ConfigError(f"The metric {name!r} returned no number: {sorted(scores)}.", fix=f"{hint}.")
        return {"value": next(iter(numbers.values())), **numbers}

    return Metric(name=Path(name).stem if script else name, key="value", compute=compute)
