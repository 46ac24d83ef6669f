"""`accel.quantize`: quantization with data in any form and, when asked, inside an accuracy budget.

The search tries the backend's schemes in the order that it declares them, fastest first, and measures each on the same
rows as the float artifact. Where a scheme loses too much, its layers are ranked by the error that each one causes alone,
and the most harmful go back to float until the budget holds. What fits is timed, and the fastest is kept, with the table
of everything tried. Nothing is written when nothing fits.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from . import progress, registry, steps
from .artifact import Artifact, check_output, staging
from .calibration import calibration_batches, data_name, load_processor
from .config import QuantizeConfig
from .errors import AccelError, BudgetError, ConfigError, QuantizeError
from .evaluation import EvaluationSet, Measured, close, open_model, positions
from .interfaces import Feeds

logger = logging.getLogger(__name__)

_PROBE_ROWS = 64
_PROBE_BATCHES = 4
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One line of the search table.

    Attributes:
        scheme: What was tried.
        settings: Settings of `QuantizeConfig` that are not its defaults.
        float_layers: Layers put back to float.
        value: Its metric; `None` when it failed.
        drop: Points lost against the float artifact.
        drop_interval: Confidence interval of the drop, in points.
        agreement: Share of predictions that are those of the float artifact.
        inside: Whether the drop is within the budget.
        bytes: Of its graph files.
        median_ms: Of one row of median length, of a language model one token; measured for what is inside the budget.
        seconds: For quantizing and measuring it.
        error: Why it failed.
        chosen: Whether it was kept.
    """

    scheme: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    float_layers: tuple[str, ...] = ()
    value: float | None = None
    drop: float | None = None
    drop_interval: tuple[float, float] | None = None
    agreement: float | None = None
    inside: bool = False
    bytes: int | None = None
    median_ms: float | None = None
    seconds: float = 0.0
    error: str | None = None
    chosen: bool = False

    def __str__(self) -> str:
        details = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        name = f"{self.scheme}{f' ({details})' if details else ''}"
        if self.float_layers:
            shown = ", ".join(self.float_layers[:3]) + (", ..." if len(self.float_layers) > 3 else "")
            name += f", {len(self.float_layers)} layers in float ({shown})"
        if self.drop is None:
            return f"{name}: failed: {self.error}"
        speed = f", {self.median_ms:.2f} ms" if self.median_ms is not None else ""
        return f"{name}: loses {self.drop:.2f} points{speed}{' <- kept' if self.chosen else ''}"


def quantize(
    artifact: Artifact | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    calibration: Any = None,
    method: str | None = None,
    max_drop: float | None = None,
    metric: str | None = None,
    data: Any = None,
    columns: Mapping[str, str] | None = None,
    calibration_columns: Mapping[str, str] | None = None,
    split: str | None = None,
    calibration_split: str | None = None,
    rows: int | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
    measure_speed: bool = True,
    backend: str | None = None,
    config: QuantizeConfig | None = None,
    **settings: Any,
) -> Artifact:
    """Rewrite a graph into one with fewer bits, inside an accuracy budget when one is given.

    Quantizing takes seconds, plus a pass over the calibration data for static schemes. A search costs one quantization
    and one evaluation for each line of its table, and one of each on 64 rows for each layer where layers must be ranked.

    Args:
        artifact: The artifact or its folder.
        out: Folder to make.
        calibration: For schemes that need activation ranges: a `datasets.Dataset`, a list of dictionaries, a CSV, JSON or
            Parquet file, the name of a data set on the Hub, or batches (dictionaries of tensors).
        method: How activation ranges are found from it: `QuantizeConfig.calibration`, whose name the data has here. A
            search tries `minmax` and `percentile` when `None`.
        max_drop: Budget: points of the metric (percentage points of accuracy) that may be lost on `data`. Searches all
            schemes that the backend declares, or only `scheme` when that is given.
        metric: What is measured; the task's default when `None`. See `accel.evaluate`.
        data: Labelled rows to measure on. Without `max_drop` the result's accuracy is measured and recorded.
        columns: Column by use of `data`, where it cannot be inferred.
        calibration_columns: Likewise of `calibration`; `columns` when `None`.
        split: Split of `data`.
        calibration_split: Split of `calibration`.
        rows: Rows of `data` at most; all when `None`.
        batch_size: Rows a call when measuring.
        max_length: Tokens that longer rows are cut to, in both.
        measure_speed: Time what fits and keep the fastest; otherwise the first in the expected order.
        backend: Who quantizes; the owner of the artifact's format when `None`.
        config: How; its fields may also be given as keyword arguments (`scheme="static-int8"`).
        **settings: Fields of `QuantizeConfig`.

    Raises:
        BudgetError: Nothing stays inside the budget; the message lists everything tried.
        BackendUnavailableError: Nobody quantizes this format with this scheme here.
        QuantizeError: It failed, the artifact is quantized already, or calibration data is missing.
        InputError: Data without rows or labels, or whose columns do not map.
    """
    artifact = artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
    chosen = QuantizeConfig.from_dict({**(config.to_dict() if config else {}), **settings})
    if method is not None:
        chosen = QuantizeConfig.from_dict({**chosen.to_dict(), "calibration": method})
    target = check_output(out, artifact.path)
    if max_drop is not None and not (max_drop >= 0 and math.isfinite(max_drop)):
        raise ConfigError(f"max_drop is {max_drop}.", fix="give the points that may be lost, such as 0.3.")
    if max_drop is not None and data is None:
        raise ConfigError("A budget needs labelled data to measure on.", fix="pass data=... (--data FILE).")
    if data is None and metric is not None:
        raise ConfigError("A metric needs labelled data to measure on.", fix="pass data=... (--data FILE).")
    _refuse_quantized(artifact)
    batches = None
    if calibration is not None:
        batches = calibration_batches(
            artifact,
            calibration,
            config=chosen,
            columns=calibration_columns if calibration_columns is not None else columns,
            split=calibration_split,
            max_length=max_length,
        )
    if data is None:
        return steps.quantize(artifact, target, calibration=batches, backend=backend, config=chosen)
    named = config is not None or "scheme" in settings
    recipes = [chosen]
    if not named and max_drop is not None:
        recipes = list(_recipes(artifact, chosen, backend, percentile=batches is not None and method is None))
    model = open_model(artifact)
    try:
        prepared = EvaluationSet(
            data,
            task=artifact.task,
            config=model.config,
            processor=load_processor(artifact.path, artifact.task),
            metric=metric,
            columns=columns,
            split=split,
            samples=rows,
            seed=chosen.seed,
            batch_size=batch_size,
            max_length=max_length,
            limit=positions(artifact),
        )
        reference = prepared.measure(model, "measuring the float artifact")
    finally:
        close(model)
    search = _Search(artifact, prepared, reference, math.inf if max_drop is None else max_drop, batches, backend)
    with staging(target) as work:
        search.run(work, recipes)
        if not search.fits and max_drop is None:
            raise search.errors[-1]
        if not search.fits:
            raise _nothing_fits(search, data_name(data))
        winner = search.fastest(measure_speed)
        made = search.keep(winner, work)
    logger.info("kept %s", search.trials[winner])
    return Artifact(target, made.manifest)


def _refuse_quantized(artifact: Artifact) -> None:
    if artifact.manifest.quantization is not None:
        raise QuantizeError(
            f"{artifact.path} is quantized already ({artifact.manifest.quantization.scheme}).",
            fix="quantize the artifact that it was made from.",
        )


def _recipes(
    artifact: Artifact, config: QuantizeConfig, backend: str | None, *, percentile: bool
) -> Iterator[QuantizeConfig]:
    """The backend's schemes, fastest first as it declares them; static ones also with percentile ranges."""
    spec = registry.owner("quantize", artifact.format, backend)
    capability = spec.capability("quantize", artifact.format)
    assert capability is not None, "an owner has the capability"
    for scheme in capability.schemes:
        recipe = replace(config, scheme=scheme)
        yield recipe
        if percentile and scheme.startswith("static"):
            yield replace(recipe, calibration="percentile")


def _nothing_fits(search: _Search, data: str) -> BudgetError:
    measured = [trial for trial in search.trials if trial.drop is not None]
    best = min(measured, key=lambda trial: trial.drop or 0.0, default=None)
    found = f"The best found is {best}." if best is not None else "No recipe could be measured."
    lines = "\n".join(f"  {trial}" for trial in search.trials)
    return BudgetError(
        f"No recipe loses at most {search.budget:g} points of {search.prepared.metric.name} on {data}, where the float "
        f"artifact has {search.reference.value:.4f}. {found} Tried:\n{lines}",
        fix="allow a larger max_drop, give calibration data for static schemes, or keep the float artifact.",
    )


class _Search:
    """The state of one search: what was tried, and what of it is still on disk."""

    def __init__(
        self,
        artifact: Artifact,
        prepared: EvaluationSet,
        reference: Measured,
        budget: float,
        calibration: Iterable[Feeds] | None,
        backend: str | None,
    ) -> None:
        self.artifact = artifact
        self.prepared = prepared
        self.reference = reference
        self.budget = budget
        self.trials: list[Trial] = []
        self.fits: dict[int, Artifact] = {}
        self.sensitivity: dict[str, dict[str, float]] = {}
        self.float_ms: float | None = None
        self.errors: list[AccelError] = []
        self._calibration = calibration
        self._backend = backend
        runs = backend is not None and registry.describe(backend).capability("run", artifact.format) is not None
        self._runner = backend if runs else None

    def run(self, work: Path, recipes: Sequence[QuantizeConfig]) -> None:
        """Try every recipe; where none has fitted yet, put layers of it back to float."""
        for recipe in recipes:
            number, made = self._try(work, recipe)
            if made is None or number in self.fits:
                continue
            layers = list(dict.fromkeys(made.manifest.steps[-1].report.get("layers", ())))
            shutil.rmtree(made.path, ignore_errors=True)
            if not self.fits and len(layers) > 1:
                self._fall_back(work, recipe, layers)

    def _try(self, work: Path, recipe: QuantizeConfig, float_layers: Sequence[str] = ()) -> tuple[int, Artifact | None]:
        """Quantize and measure; what fits stays in `work`."""
        started = time.perf_counter()
        number = len(self.trials)
        folder = work / f"trial-{number}"
        defaults = QuantizeConfig().to_dict()
        settings = {
            name: value
            for name, value in recipe.to_dict().items()
            if value != defaults[name] and name not in ("scheme", "samples", "seed")
        }
        trial = Trial(scheme=recipe.scheme, settings=settings, float_layers=tuple(float_layers))
        config = replace(recipe, exclude=(*recipe.exclude, *float_layers))
        made: Artifact | None = None
        try:
            made = steps.quantize(
                self.artifact, folder, calibration=self._calibration, backend=self._backend, config=config
            )
            measured = self._measure(made, str(trial.scheme))
        except AccelError as error:
            shutil.rmtree(folder, ignore_errors=True)
            made = None
            trial = replace(trial, error=error.message.splitlines()[0])
            self.errors.append(error)
        else:
            comparison = self.prepared.compare(measured, self.reference, "the float artifact")
            drop = self.prepared.metric.drop(self.reference.value, measured.value)
            ends = [self.prepared.metric.drop(0.0, end) for end in (comparison.interval.low, comparison.interval.high)]
            trial = replace(
                trial,
                value=measured.value,
                drop=drop,
                drop_interval=(min(ends), max(ends)),
                agreement=comparison.agreement,
                inside=drop <= self.budget + _EPSILON,
                bytes=made.bytes,
            )
        trial = replace(trial, seconds=round(time.perf_counter() - started, 2))
        self.trials.append(trial)
        logger.info("%s", trial)
        if made is not None and trial.inside:
            self.fits[number] = made
        return number, made

    def _measure(self, made: Artifact, what: str) -> Measured:
        model = open_model(made, backend=self._runner)
        try:
            return self.prepared.measure(model, f"measuring {what}")
        finally:
            close(model)

    # Layer by layer

    def _fall_back(self, work: Path, recipe: QuantizeConfig, layers: Sequence[str]) -> None:
        """Put the most harmful layers back to float: 1, 2, 4, ... of them, then the fewest that still fit.

        At most half of the layers: beyond that too little is left to be worth it.
        """
        ranked = self._rank(work, recipe, layers)
        limit = max(1, len(layers) // 2)
        outside, inside, count = 0, None, 1
        while inside is None and outside < limit:
            count = min(count, limit)
            number, made = self._try(work, recipe, ranked[:count])
            if made is None:
                return
            if number in self.fits:
                inside = (count, number)
            else:
                shutil.rmtree(made.path, ignore_errors=True)
                outside, count = count, count * 2
        while inside is not None and inside[0] - outside > 1:
            middle = (inside[0] + outside) // 2
            number, made = self._try(work, recipe, ranked[:middle])
            if number in self.fits:
                self._drop(inside[1])
                inside = (middle, number)
            else:
                if made is not None:
                    shutil.rmtree(made.path, ignore_errors=True)
                outside = middle

    def _drop(self, number: int) -> None:
        """Forget a trial that a better one replaces: the same recipe with fewer layers in float."""
        shutil.rmtree(self.fits.pop(number).path, ignore_errors=True)

    def _rank(self, work: Path, recipe: QuantizeConfig, layers: Sequence[str]) -> list[str]:
        """Layers by the error that each causes when it alone is quantized, most harmful first.

        The error is that of the outputs relative to the float artifact's, on 64 rows: much finer than a metric, and not
        blind, as leaving one layer out would be, where two layers do harm.
        """
        rows = list(range(len(self.prepared.encoded)))
        rows = rows[:: max(1, len(rows) // _PROBE_ROWS)][:_PROBE_ROWS]
        expected = self._outputs(self.artifact, rows)
        calibration = None if self._calibration is None else _First(self._calibration, _PROBE_BATCHES)
        harm: dict[str, float] = {}
        for layer in progress.track(layers, f"ranking layers ({recipe.scheme})"):
            others = tuple(name for name in layers if name != layer)
            folder = work / "probe"
            config = replace(recipe, exclude=(*recipe.exclude, *others))
            try:
                with progress.listening(_silent):
                    made = steps.quantize(
                        self.artifact, folder, calibration=calibration, backend=self._backend, config=config
                    )
                    harm[layer] = _distance(self._outputs(made, rows), expected)
            except AccelError as error:
                logger.info("layer %s alone cannot be measured: %s", layer, error.message)
                harm[layer] = math.inf
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        ranked = sorted(layers, key=lambda layer: -harm[layer])
        self.sensitivity[recipe.scheme] = {layer: harm[layer] for layer in ranked if math.isfinite(harm[layer])}
        return ranked

    def _outputs(self, artifact: Artifact, rows: Sequence[int]) -> list[torch.Tensor]:
        """All floating-point outputs on some rows, without what belongs to padding."""
        runner = None if artifact is self.artifact else self._runner
        model = open_model(artifact, backend=runner)
        found: list[torch.Tensor] = []
        try:
            for _, feeds, output in self.prepared.batches(model, "ranking layers", rows):
                mask = feeds.get("attention_mask")
                for value in output.values():
                    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                        continue
                    kept = mask is not None and value.ndim >= 2 and value.shape[:2] == mask.shape
                    assert mask is not None or not kept
                    found.append((value[mask.bool()] if kept and mask is not None else value).double().cpu().flatten())
        finally:
            close(model)
        return found

    # What is kept

    def fastest(self, measure_speed: bool) -> int:
        """The number of the trial to keep: the fastest that fits, by measured latency."""
        candidates = list(self.fits)
        if measure_speed:
            paths = [self.artifact.path, *(self.fits[i].path for i in candidates)]
            medians = _latencies(paths, self.artifact.task, self._median_row(), self._runner)
            self.float_ms = medians[0]
            for i, median in zip(candidates, medians[1:], strict=True):
                self.trials[i] = replace(self.trials[i], median_ms=median)
            winner = min(candidates, key=lambda i: self.trials[i].median_ms or math.inf)
            kept = self.trials[winner].median_ms or math.inf
            if kept > self.float_ms:
                logger.warning(
                    "The fastest recipe inside the budget takes %.2f ms, the float artifact %.2f: it is smaller, not faster.",
                    kept,
                    self.float_ms,
                )
        else:
            winner = candidates[0]
        self.trials[winner] = replace(self.trials[winner], chosen=True)
        return winner

    def _median_row(self) -> dict[str, torch.Tensor]:
        """A row of median length; of a language model one token, since that is what generating takes time for."""
        order = [i for part in self.prepared.encoded.plan(1) for i in part]
        feeds = self.prepared.encoded.batch([order[len(order) // 2]])
        if self.artifact.task == "text-generation":
            feeds = {name: value[:, :1] for name, value in feeds.items()}
        return {name: value for name, value in feeds.items() if isinstance(value, torch.Tensor)}

    def keep(self, winner: int, work: Path) -> Artifact:
        """Make the winner the only content of `work`, with the search table in its manifest."""
        made, trial = self.fits[winner], self.trials[winner]
        for number in range(len(self.trials)):
            if number != winner:
                shutil.rmtree(work / f"trial-{number}", ignore_errors=True)
        for path in made.path.iterdir():
            path.replace(work / path.name)
        made.path.rmdir()
        step = made.manifest.steps[-1]
        accuracy = {
            "metric": self.prepared.metric.name,
            "value": trial.value,
            "float": self.reference.value,
            "drop": trial.drop,
            "drop_interval": list(trial.drop_interval or ()),
            "agreement": trial.agreement,
            "data": self.prepared.rows.sample.to_dict(),
            "max_length": self.prepared.max_length,
            "batch_size": self.prepared.batch_size,
        }
        report = dict(step.report)
        if math.isfinite(self.budget):
            report["search"] = {
                "max_drop": self.budget,
                "float_ms": self.float_ms,
                "table": [asdict(t) for t in self.trials],
                "sensitivity": self.sensitivity,
            }
        moved = Artifact(work, made.manifest)
        return moved.with_step(validation={**step.validation, "accuracy": accuracy}, report=report)


class _First:
    """The first batches of an iterable, again and again."""

    def __init__(self, batches: Iterable[Feeds], count: int) -> None:
        self._batches = batches
        self._count = count

    def __iter__(self) -> Iterator[Feeds]:
        return itertools.islice(iter(self._batches), self._count)


def _silent(what: str, done: int, total: int | None) -> None:
    """Steps inside a step do not report."""


def _distance(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Squared error relative to the squares of the expected values; infinite when a value is not finite."""
    wrong = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    scale = sum(float(b.square().sum()) for b in expected)
    value = wrong / scale if scale else wrong
    return value if math.isfinite(value) else math.inf


def _latencies(paths: Sequence[Path], task: str, feeds: Mapping[str, torch.Tensor], backend: str | None) -> list[float]:
    """Median milliseconds of artifacts on the same inputs, one process each, taking turns."""
    from .benchmarking import Variant, measure

    variants = [
        Variant(name=f"{number}", path=path, task=task, backend=backend if number else None)
        for number, path in enumerate(paths)
    ]
    return [timing.median for timing in measure(variants, feeds, rounds=6, calls=20)]
