"""Metrics by the names of the `evaluate` library.

The common ones are here, on scikit-learn and SciPy, so that they work offline and fast; any other name, or the path of a
metric script, goes to `evaluate` where it is installed and the script can be reached. Values are on the scale that
`evaluate` gives them: fractions, except `squad`'s percentages.

For a confidence interval a metric is written as a function of sums over rows: `sums` returns one vector a row, `finish`
turns their sum into the value. A resampled value is then one matrix product away (`comparing.bootstrap`).
"""

from __future__ import annotations

import pkgutil
import re
import string
from collections import Counter
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
    return _divide(sums[..., 0], sums[..., 1])


def _divide(numerator: Floats, denominator: Floats) -> Floats:
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
        values = _divide(hits, below)
        if average == "weighted":
            return _divide((values * true).sum(-1), true.sum(-1))
        # Classes that are neither true nor predicted do not count.
        present = (predicted + true) > 0
        return _divide((values * present).sum(-1), present.sum(-1).astype(np.float64))

    return finish


def _by_sklearn(which: str, average: str) -> Callable[[Values, Values], dict[str, float]]:
    def compute(predictions: Values, references: Values) -> dict[str, float]:
        from sklearn import metrics

        function = {"f1": metrics.f1_score, "precision": metrics.precision_score, "recall": metrics.recall_score}[which]
        return {which: float(function(references, predictions, average=average, zero_division=0))}

    return compute


def _class_metric(name: str, which: str, average: str) -> Metric:
    return Metric(
        name=name,
        key=which,
        compute=_by_sklearn(which, average),
        sums=_class_sums,
        finish=_averaged(which, average),
    )


def _matthews(predictions: Values, references: Values) -> dict[str, float]:
    from sklearn.metrics import matthews_corrcoef

    return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}


def _matthews_finish(sums: Floats) -> Floats:
    # Gorodkin (2004): correlation of the one-hot predictions and labels.
    hits, predicted, true = np.split(sums, 3, axis=-1)
    rows, correct = true.sum(-1), hits.sum(-1)
    covariance = correct * rows - (predicted * true).sum(-1)
    spread = (rows**2 - (predicted**2).sum(-1)) * (rows**2 - (true**2).sum(-1))
    return _divide(covariance, np.sqrt(spread))


# Numbers: regression, similarity.


def _correlation(which: str) -> Callable[[Values, Values], dict[str, float]]:
    def compute(predictions: Values, references: Values) -> dict[str, float]:
        from scipy import stats

        found, true = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
        if len(found) < 2 or np.ptp(found) == 0 or np.ptp(true) == 0:
            return {which: float("nan")}  # nothing varies
        function = stats.spearmanr if which == "spearmanr" else stats.pearsonr
        return {which: float(function(found, true)[0])}

    return compute


def _moments(predictions: Values, references: Values) -> Floats:
    found, true = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    # Centred first: the sums of squares would lose digits otherwise.
    found, true = found - found.mean(), true - true.mean()
    return np.stack([np.ones_like(found), found, true, found * found, true * true, found * true], axis=1)


def _pearson_finish(sums: Floats) -> Floats:
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    return _divide(n * xy - x * y, np.sqrt(np.maximum((n * xx - x * x) * (n * yy - y * y), 0)))


def _mse(predictions: Values, references: Values) -> dict[str, float]:
    found, true = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    return {"mse": float(np.mean((found - true) ** 2))}


def _squares(predictions: Values, references: Values) -> Floats:
    squared = (np.asarray(predictions, np.float64) - np.asarray(references, np.float64)) ** 2
    return np.stack([squared, np.ones_like(squared)], axis=1)


# Tags: predictions and references are lists of tag names.


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Spans `(type, first, last)` in tags of the IOB1, IOB2, IOE and IOBES schemes, as conlleval and seqeval read them.

    A tag without a prefix counts as `I-`.
    """
    found: set[tuple[str, int, int]] = set()
    start, kind, before = 0, "", "O"
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-") if tag[:2] in ("B-", "I-", "E-", "S-") else ("I", "", tag)
        if tag == "O":
            prefix, name = "O", ""
        continues = before in ("B", "I") and prefix in ("I", "E") and name == kind
        if not continues:
            if before != "O":
                found.add((kind, start, position - 1))
            start, kind = position, name
        before = prefix
    return found


def _span_sums(predictions: Values, references: Values) -> Floats:
    rows = []
    for found, true in zip(predictions, references, strict=True):
        a, b = entities(found), entities(true)
        hits = sum(x == y for x, y in zip(found, true, strict=True))
        rows.append((len(a & b), len(a), len(b), hits, len(true)))
    return np.asarray(rows, np.float64)


def _seqeval(predictions: Values, references: Values) -> dict[str, float]:
    hits, predicted, true, right, tokens = _span_sums(predictions, references).sum(0)
    return {
        "overall_precision": float(hits / predicted) if predicted else 0.0,
        "overall_recall": float(hits / true) if true else 0.0,
        "overall_f1": float(2 * hits / (predicted + true)) if predicted + true else 0.0,
        "overall_accuracy": float(right / tokens) if tokens else 0.0,
    }


def _span_f1(sums: Floats) -> Floats:
    return _divide(2 * sums[..., 0], sums[..., 1] + sums[..., 2])


def _token_accuracy(predictions: Values, references: Values) -> dict[str, float]:
    return {"accuracy": _seqeval(predictions, references)["overall_accuracy"]}


def _token_share(sums: Floats) -> Floats:
    return _divide(sums[..., 3], sums[..., 4])


# Answers: predictions are texts, references lists of accepted texts (none: unanswerable).


def _normalized(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces (the official SQuAD 1.1 script)."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def _overlap(found: str, true: str) -> float:
    a, b = _normalized(found).split(), _normalized(true).split()
    if not a or not b:
        return float(a == b)
    same = sum((Counter(a) & Counter(b)).values())
    return 2 * same / (len(a) + len(b))


def _answer_sums(predictions: Values, references: Values) -> Floats:
    rows = []
    for found, accepted in zip(predictions, references, strict=True):
        accepted = accepted or [""]
        exact = any(_normalized(found) == _normalized(text) for text in accepted)
        rows.append((float(exact), 1.0, max(_overlap(found, text) for text in accepted)))
    return np.asarray(rows, np.float64)


def _squad(predictions: Values, references: Values) -> dict[str, float]:
    exact, rows, overlap = _answer_sums(predictions, references).sum(0)
    return {"exact_match": float(100 * exact / rows), "f1": float(100 * overlap / rows)}


def _squad_f1(sums: Floats) -> Floats:
    return 100 * _divide(sums[..., 2], sums[..., 1])


def _exact_match(predictions: Values, references: Values) -> dict[str, float]:
    return {"exact_match": _squad(predictions, references)["exact_match"] / 100}


# Tokens: predictions are `TokenScores`; the rows themselves are the references.


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


def _losses(predictions: Values, _: Values) -> Floats:
    return np.asarray([(row.loss, row.tokens) for row in predictions], np.float64)


def _perplexity_finish(sums: Floats) -> Floats:
    # A loss whose exponential is no number any more is infinitely perplexed.
    with np.errstate(over="ignore"):
        return np.exp(ratio(sums))


def _perplexity(predictions: Values, references: Values) -> dict[str, float]:
    sums = _losses(predictions, references).sum(0)
    return {"perplexity": float(_perplexity_finish(sums)), "loss": float(ratio(sums)), "tokens": float(sums[1])}


_AVERAGED = tuple(
    f"{which}_{average}" for which in ("f1", "precision", "recall") for average in ("macro", "micro", "weighted")
)
OFFERED: Mapping[str, tuple[str, ...]] = {
    "classes": ("accuracy", "f1", "precision", "recall", "matthews_correlation", *_AVERAGED),
    "tags": ("seqeval", "accuracy"),
    "answers": ("squad", "exact_match"),
    "numbers": ("spearmanr", "pearsonr", "mse"),
    "similarities": ("spearmanr", "pearsonr"),
    "tokens": ("perplexity",),
    "boxes": ("map", "map_50", "map_75"),
    "areas": ("mean_iou", "pixel_accuracy", "mean_accuracy"),
    "depths": ("abs_rel", "delta1", "rmse"),
    "pixels": ("psnr",),
    "transcripts": ("wer", "cer"),
    "frames": ("accuracy",),
    "document answers": ("anls",),
    "voices": ("eer",),
    "rankings": ("ndcg@10", "mrr@10", "map"),
}
"""The metrics that work offline, by what predictions are, the default first."""

_MADE_BY = {
    **dict.fromkeys(("boxes", "areas", "depths", "pixels"), "accel.measuring.accuracy.image_metrics:of_images"),
    "transcripts": "accel.measuring.accuracy.rates:edit_rate",
    "document answers": "accel.measuring.accuracy.documents:answers_alike",
    "frames": "accel.measuring.accuracy.rates:frame_accuracy",
    "voices": "accel.measuring.accuracy.rates:equal_error_rate",
    "rankings": "accel.measuring.accuracy.ranking:ranked",
}
"""What makes the metrics of predictions that have a module of their own, from a metric's name."""

_SYNONYMS = {
    "miou": "mean_iou",
    "map@50": "map_50",
    "spearman": "spearmanr",
    "pearson": "pearsonr",
    "mcc": "matthews_correlation",
    "em": "exact_match",
}


def metric_for(name: str | None, kind: str, *, classes: int = 2, trust_remote_code: bool = False) -> Metric:
    """The metric of that name.

    Args:
        name: One of `OFFERED`, another one of `evaluate`'s, or the path of a metric script; the default when `None`. `f1`,
            `precision` and `recall` are those of class 1 for two classes and macro averages for more; `f1_micro`,
            `f1_macro` and `f1_weighted` say it.
        kind: What predictions are; a key of `OFFERED`.
        classes: Of the model.
        trust_remote_code: Allow a metric of a Hub user, whose script is run.

    Raises:
        ConfigError: A metric that does not exist, does not fit the predictions, or cannot be reached from here.
    """
    known = OFFERED[kind]
    plain = known[0] if name is None else _SYNONYMS.get(name, name)
    if plain in known:
        return _shipped(plain, kind, classes)
    assert name is not None
    if any(plain in names for names in OFFERED.values()):
        raise ConfigError(f"{name} does not measure {kind}.", fix=f"use one of {', '.join(known)}.")
    return _through_evaluate(name, known, trust_remote_code)


def _shipped(name: str, kind: str, classes: int) -> Metric:
    which, _, average = name.partition("_")
    if which in ("f1", "precision", "recall"):
        return _class_metric(name, which, average or ("binary" if classes == 2 else "macro"))
    if kind in _MADE_BY:
        made: Metric = pkgutil.resolve_name(_MADE_BY[kind])(name)
        return made
    if name == "accuracy" and kind == "tags":
        return Metric(name=name, key=name, compute=_token_accuracy, sums=_span_sums, finish=_token_share)
    return {
        "accuracy": Metric(name=name, key=name, compute=_accuracy, sums=_correct, finish=ratio, rowwise=True),
        "matthews_correlation": Metric(
            name=name, key=name, compute=_matthews, sums=_class_sums, finish=_matthews_finish
        ),
        "seqeval": Metric(name=name, key="overall_f1", compute=_seqeval, sums=_span_sums, finish=_span_f1),
        "squad": Metric(name=name, key="f1", compute=_squad, sums=_answer_sums, finish=_squad_f1, points=1.0),
        "exact_match": Metric(name=name, key=name, compute=_exact_match, sums=_answer_sums, finish=ratio, rowwise=True),
        "pearsonr": Metric(name=name, key=name, compute=_correlation(name), sums=_moments, finish=_pearson_finish),
        "spearmanr": Metric(name=name, key=name, compute=_correlation(name)),
        "perplexity": Metric(
            name=name,
            key=name,
            compute=_perplexity,
            sums=_losses,
            finish=_perplexity_finish,
            points=1.0,
            higher_is_better=False,
        ),
        "mse": Metric(
            name=name, key=name, compute=_mse, sums=_squares, finish=ratio, points=1.0, higher_is_better=False
        ),
    }[name]


def _through_evaluate(name: str, known: Sequence[str], trust_remote_code: bool) -> Metric:
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
            f"{name!r} is not a metric that accel has.{did_you_mean(name, [*known, *_SYNONYMS])}",
            fix=f'{hint}, or install the evaluate library: pip install "accel-transformers[evaluate]".',
        ) from error
    try:
        loaded = evaluate.load(str(Path(name).expanduser()) if script else name)
    # A script is foreign code, and an unreachable Hub fails in several ways.
    except Exception as error:
        raise ConfigError(
            f"The metric {name!r} cannot be loaded: {str(error).splitlines()[0] if str(error) else type(error).__name__}."
            f"{did_you_mean(name, [*known, *_SYNONYMS])}",
            fix=f"{hint}, which work offline; or give the path of a metric script.",
        ) from error

    def compute(predictions: Values, references: Values) -> dict[str, float]:
        scores = loaded.compute(predictions=list(predictions), references=list(references)) or {}
        numbers = {key: float(value) for key, value in scores.items() if np.ndim(value) == 0}
        if not numbers:
            raise ConfigError(f"The metric {name!r} returned no number: {sorted(scores)}.", fix=f"{hint}.")
        return {"value": next(iter(numbers.values())), **numbers}

    return Metric(name=Path(name).stem if script else name, key="value", compute=compute)
