"""Metrics, named as in the `evaluate` library.

This module contains the metrics that several tasks share. They use NumPy and SciPy, so that they work offline and fast. The `evaluate`
library, if it is installed, loads metrics with other names and metric scripts. Values are on the scale of `evaluate`: fractions, except
for `squad`, which returns percentages.

To get confidence intervals fast, write a metric as a function of sums over rows: `sums` returns one vector for each row, and
`finish` turns the sum of these vectors into the value. A resampled value then costs one matrix product (`comparison.bootstrap`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, PluginError, did_you_mean

Floats = npt.NDArray[np.float64]
Values = Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric that compares predictions with references.

    Attributes:
        name: Name of the metric as the user wrote it.
        key: Name of the score that is the value of the metric.
        compute: Function from predictions and references to scores by name.
        sums: Function from predictions and references to one vector for each row: `(rows, k)`, dense or sparse; `None` if the metric is
            not a function of sums.
        finish: Function from sums over rows `(..., k)` to values `(...)`.
        resampled: For metrics that are not a function of sums: function from predictions and references to another function, which
            maps weights of rows `(samples, rows)` to values `(samples,)`.
        rowwise: Whether the metric is the mean of a 0 or 1 for each row. The first column of `sums` is then this 0 or 1.
        points: Factor from a difference to points: 100 for fractions, 1 for percentages.
        higher_is_better: Whether larger values are better; `False` for error metrics.
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

    def row_sums(self, predictions: Values, references: Values) -> Any:
        """Return the vector of each row, `(rows, k)`, dense or sparse. The metric must be a function of sums.

        Raises:
            PluginError: `sums` returned a value of another shape.
        """
        assert self.sums is not None
        return checked_sums(self.name, self.sums(predictions, references), len(references))

    def drop(self, reference: float, value: float) -> float:
        """Return by how many points `value` is worse than `reference`; negative if it is better."""
        difference = reference - value if self.higher_is_better else value - reference
        return difference * self.points


def checked_sums(name: str, vectors: Any, rows: int) -> Any:
    """Return the vectors of a metric after checking that their shape is `(rows, k)`.

    Raises:
        PluginError: The shape is different.
    """
    shape = tuple(getattr(vectors, "shape", ()))
    if len(shape) != 2 or shape[0] != rows:
        returned = f"an array of shape {shape}" if shape else f"a {type(vectors).__name__}"
        raise PluginError(
            f"The sums of the metric {name!r} must be an array of shape ({rows}, k): one vector for each row. "
            f"The function returned {returned}.",
            fix="let the metric's sums return a two-dimensional array with one row for each reference.",
        )
    return vectors


def metric_of_sums(
    name: str,
    sums: Callable[[Values, Values], Floats],
    scores: Mapping[str, Callable[[Floats], Floats]],
    *,
    key: str = "",
    **traits: Any,
) -> Metric:
    """Return a metric whose scores are functions of sums over rows.

    Args:
        name, sums: Fields of `Metric` with these names.
        scores: By score name, a function from sums over rows `(..., k)` to values `(...)`.
        key: Name of the score that is the value of the metric; the first score if empty.
        **traits: Fields `rowwise`, `points` and `higher_is_better` of `Metric`.
    """

    def compute(predictions: Values, references: Values) -> dict[str, float]:
        total = checked_sums(name, sums(predictions, references), len(references)).sum(0)
        return {score: float(finish(total)) for score, finish in scores.items()}

    key = key or next(iter(scores))
    return Metric(name=name, key=key, compute=compute, sums=sums, finish=scores[key], **traits)


# Metrics of classes: predictions and references are class numbers.


def _correct(predictions: Values, references: Values) -> Floats:
    right = (np.asarray(predictions) == np.asarray(references)).astype(np.float64)
    return np.stack([right, np.ones_like(right)], axis=1)


def ratio(sums: Floats) -> Floats:
    """Return the first of two sums divided by the second; 0 where the second is 0."""
    return divide(sums[..., 0], sums[..., 1])


def divide(numerator: Floats, denominator: Floats) -> Floats:
    """Return the quotient; 0 where the denominator is 0, as in scikit-learn."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)


def _class_sums(predictions: Values, references: Values) -> Any:
    """Return three 0/1 values for each row and class (correct, predicted, true): `(rows, 3 * classes)`, sparse."""
    from scipy.sparse import coo_array

    predicted, true = np.asarray(predictions), np.asarray(references)
    classes = np.union1d(np.union1d(predicted, true), [0, 1])  # binary averages read class 1, even if it is in no row
    a, b = np.searchsorted(classes, predicted), np.searchsorted(classes, true)
    hits, rows, count = np.flatnonzero(a == b), np.arange(len(predicted)), len(classes)
    indices = np.concatenate([hits, rows, rows]), np.concatenate([a[hits], count + a, 2 * count + b])
    shape = (len(rows), 3 * count)
    return coo_array((np.ones(len(indices[0])), indices), shape=shape).tocsr()


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
        # As in scikit-learn, the macro average leaves out classes that are neither predicted nor true in any row.
        present = (predicted + true) > 0
        return divide((values * present).sum(-1), present.sum(-1).astype(np.float64))

    return finish


def _matthews(sums: Floats) -> Floats:
    # Matthews correlation for several classes: the correlation of the one-hot predictions and labels (Gorodkin, 2004).
    hits, predicted, true = np.split(sums, 3, axis=-1)
    rows, correct = true.sum(-1), hits.sum(-1)
    covariance = correct * rows - (predicted * true).sum(-1)
    spread = (rows**2 - (predicted**2).sum(-1)) * (rows**2 - (true**2).sum(-1))
    return divide(covariance, np.sqrt(spread))


def class_metrics(classes: int) -> dict[str, Metric]:
    """Return metrics of class numbers by name.

    `f1`, `precision` and `recall` are the scores of class 1 if there are two classes, and macro averages if there are more.
    """
    by_name = {"accuracy": metric_of_sums("accuracy", _correct, {"accuracy": ratio}, rowwise=True)}
    usual = "binary" if classes == 2 else "macro"
    averages = {"": usual, "_macro": "macro", "_micro": "micro", "_weighted": "weighted"}
    for which in ("f1", "precision", "recall"):
        for suffix, average in averages.items():
            by_name[which + suffix] = metric_of_sums(which + suffix, _class_sums, {which: _averaged(which, average)})
    name = "matthews_correlation"
    return {**by_name, name: metric_of_sums(name, _class_sums, {name: _matthews})}


# Metrics of numbers: regression, similarity.


def correlation(which: str) -> Metric:
    """Return the metric `spearmanr` or `pearsonr`."""

    def compute(predictions: Values, references: Values) -> dict[str, float]:
        from scipy import stats

        x, y = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
        if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
            return {which: float("nan")}  # constant values have no correlation
        function = stats.spearmanr if which == "spearmanr" else stats.pearsonr
        return {which: float(function(x, y)[0])}

    return Metric(name=which, key=which, compute=compute)


# Metrics of texts. The predictions are `LanguageModelPrediction` objects; references are not needed.


@dataclass(frozen=True, slots=True)
class LanguageModelPrediction:
    """How well a language model predicted the tokens of a row.

    Attributes:
        loss: Sum of the negative log likelihoods, in nats.
        tokens: Number of predicted tokens.
        best: The most likely token at each position.
    """

    loss: float
    tokens: int
    best: tuple[int, ...]


def edits(predicted: Sequence[str], true: Sequence[str]) -> int:
    """Return the number of insertions, deletions and substitutions between two sequences (Levenshtein, 1966)."""
    row = list(range(len(predicted) + 1))
    for i, expected in enumerate(true, start=1):
        before, row[0] = row[0], i
        for j, word in enumerate(predicted, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (expected != word))
    return row[-1]


SYNONYMS = {
    "miou": "mean_iou",
    "map@50": "map_50",
    "spearman": "spearmanr",
    "pearson": "pearsonr",
    "mcc": "matthews_correlation",
    "em": "exact_match",
}
"""Alternative names of metrics, mapped to the names in this module."""


def through_evaluate(name: str, metric_names: Sequence[str], trust_remote_code: bool) -> Metric:
    """Load a metric script with the `evaluate` library, from a path or from the Hub.

    Raises:
        ConfigError: `evaluate` is not installed, or the script cannot be loaded.
    """
    hint = f"use one of {', '.join(metric_names)}" if metric_names else "use another metric"
    script = Path(name).expanduser().exists()
    if "/" in name and not script and not trust_remote_code:
        raise ConfigError(
            f"The metric {name!r} is a script of a Hub user, which would run on this machine.",
            fix=f"{hint}, or pass trust_remote_code=True (--trust-remote-code) if you trust the script.",
        )
    try:
        import evaluate
    except ImportError as error:
        raise ConfigError(
            f"accel has no metric {name!r} for this task, and the evaluate library is not installed."
            f"{did_you_mean(name, [*metric_names, *SYNONYMS])}",
            fix=f'{hint}, or install the evaluate library: pip install "accel-transformers[evaluate]".',
        ) from error
    try:
        loaded = evaluate.load(str(Path(name).expanduser()) if script else name)
    # Catch all exceptions: the script is third-party code, and an unreachable Hub raises several types of errors.
    except Exception as error:
        raise ConfigError(
            f"The evaluate library cannot load the metric {name!r}: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}.{did_you_mean(name, [*metric_names, *SYNONYMS])}",
            fix=f"{hint}, which work offline, or pass the path of a metric script.",
        ) from error

    def compute(predictions: Values, references: Values) -> dict[str, float]:
        scores = loaded.compute(predictions=list(predictions), references=list(references)) or {}
        numbers = {key: float(value) for key, value in scores.items() if np.ndim(value) == 0}
        if not numbers:
            raise ConfigError(
                f"The metric {name!r} returned no score that is a single number; it returned {sorted(scores)}.",
                fix=f"{hint}.",
            )
        return {"value": next(iter(numbers.values())), **numbers}

    return Metric(name=Path(name).stem if script else name, key="value", compute=compute)
