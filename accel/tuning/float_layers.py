"""One attempt after the other to quantize inside a budget: what was tried, what fits, which layers go back to float."""

from __future__ import annotations

import itertools
import logging
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .. import progress
from ..artifact.manifest import Artifact
from ..backends import registry
from ..backends.sessions import RunSettings
from ..config import QuantizeConfig
from ..errors import AccelError
from ..interfaces.protocols import Feeds
from ..interfaces.task_registry import task_spec
from ..measuring.accuracy.comparing import Scored
from ..measuring.accuracy.evaluation import EvaluationSet
from ..measuring.disturbance import Disturbance, MachineWatch
from ..measuring.latency.results import ratio_of, without_infinity
from ..measuring.latency.rounds import Timing, measure
from ..measuring.latency.variants import Variant
from ..models.auto import close, open_model
from ..stages.quantize import quantize as quantize_once

logger = logging.getLogger(__name__)

_PROBE_ROWS = 64
_PROBE_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
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
        median_ms: Of one call of `batch_size` rows of median length, of a language model one token each; measured for what is
            inside the budget.
        speedup: How many times faster than the float artifact, with the interval; see `accel.measuring.statistics.speedup`.
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
    speedup: Mapping[str, Any] | None = None
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
        if self.speedup is not None:
            speed += f", times float {ratio_of(self.speedup)}"
        return f"{name}: loses {self.drop:.2f} points{speed}{' <- kept' if self.chosen else ''}"


class BudgetSearch:
    """The state of one search: what was tried, and what of it is still on disk."""

    def __init__(
        self,
        artifact: Artifact,
        prepared: EvaluationSet,
        reference: Scored,
        budget: float,
        calibration: Iterable[Feeds] | None,
        backend: str | None,
        watch: MachineWatch,
    ) -> None:
        self.artifact = artifact
        self.prepared = prepared
        self.reference = reference
        self.budget = budget
        self.trials: list[Attempt] = []
        self.fits: dict[int, Artifact] = {}
        self.sensitivity: dict[str, dict[str, float]] = {}
        self.float_ms: float | None = None
        self.disturbance: Disturbance | None = None
        self._watch = watch
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
        trial = Attempt(scheme=recipe.scheme, settings=settings, float_layers=tuple(float_layers))
        config = replace(recipe, exclude=(*recipe.exclude, *float_layers))
        made: Artifact | None = None
        try:
            made = quantize_once(
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
            trial = replace(
                trial,
                **comparison.in_a_table(),
                inside=not comparison.excess(self.budget),
                bytes=made.bytes,
            )
        trial = replace(trial, seconds=round(time.perf_counter() - started, 2))
        self.trials.append(trial)
        logger.info("%s", trial)
        if made is not None and trial.inside:
            self.fits[number] = made
        return number, made

    def _measure(self, made: Artifact, what: str) -> Scored:
        model = open_model(made, RunSettings(backend=self._runner))
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
        rows = list(range(len(self.prepared.predictor.encoded)))
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
                    made = quantize_once(
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
        model = open_model(artifact, RunSettings(backend=runner))
        found: list[torch.Tensor] = []
        try:
            for _, feeds, output in self.prepared.predictor.batches(model, "ranking layers", rows):
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
        """The number of the trial to keep: the fastest that fits, by measured latency.

        Where the interval of the ratio to the fastest one includes 1, or they are within `NOISE`, the simpler trial is kept: the
        one with fewer settings, then with fewer layers in float, then the one that the backend declares first.
        """
        candidates = list(self.fits)
        if not measure_speed:
            winner = candidates[0]
            self.trials[winner] = replace(self.trials[winner], chosen=True)
            return winner
        paths = [self.artifact.path, *(self.fits[i].path for i in candidates)]
        base, *timings = _timings(paths, self.artifact.task, self._median_rows(), self._runner)
        self.float_ms = base.median
        self.disturbance = self._watch.judge({"the float artifact": base.round_ms})
        for i, timing in zip(candidates, timings, strict=True):
            speedup = without_infinity(asdict(timing.speedup(base)))
            self.trials[i] = replace(self.trials[i], median_ms=timing.median, speedup=speedup)
        of = dict(zip(candidates, timings, strict=True))
        fastest = max(candidates, key=lambda i: of[i].speedup(base).value)
        equal = [i for i in candidates if i == fastest or of[fastest].speedup(of[i]).equal]
        winner = min(equal, key=lambda i: (len(self.trials[i].settings), len(self.trials[i].float_layers), i))
        self.trials[winner] = replace(self.trials[winner], chosen=True)
        found = of[winner].speedup(base)
        if found.equal or found.value < 1:
            logger.warning(
                "The recipe kept inside the budget takes %.2f ms, the float artifact %.2f (%s times as fast): it is smaller, not "
                "faster.",
                of[winner].median, base.median, found,
            )  # fmt: skip
        return winner

    def _median_rows(self) -> dict[str, torch.Tensor]:
        """A call of rows of median length; of a language model one token each, since that is what generating takes time for."""
        plan = self.prepared.predictor.encoded.plan(self.prepared.predictor.batch_size)
        feeds = self.prepared.predictor.encoded.batch(plan[len(plan) // 2])
        if task_spec(self.artifact.task).generates:
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
            "max_length": self.prepared.predictor.max_length,
            "batch_size": self.prepared.predictor.batch_size,
        }
        report = dict(step.report)
        if math.isfinite(self.budget):
            report["search"] = {
                "max_drop": self.budget,
                "float_ms": self.float_ms,
                "batch_size": self.prepared.predictor.batch_size,
                "disturbance": asdict(self.disturbance) if self.disturbance is not None else None,
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

    @property
    def parts(self) -> dict[str, Sequence[Feeds]]:
        """Likewise those of each graph, where the batches have them."""
        return {name: found[: self._count] for name, found in getattr(self._batches, "parts", {}).items()}


def _silent(what: str, done: int, total: int | None) -> None:
    """Steps inside a step do not report."""


def _distance(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Squared error relative to the squares of the expected values; infinite when a value is not finite."""
    wrong = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    scale = sum(float(b.square().sum()) for b in expected)
    value = wrong / scale if scale else wrong
    return value if math.isfinite(value) else math.inf


def _timings(paths: Sequence[Path], task: str, feeds: Mapping[str, torch.Tensor], backend: str | None) -> list[Timing]:
    """Artifacts on the same inputs, one process each, taking turns."""
    variants = [
        Variant(name=f"{number}", path=path, task=task, backend=backend if number else None)
        for number, path in enumerate(paths)
    ]
    return measure(variants, feeds, rounds=6, calls=20)
