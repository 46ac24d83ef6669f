"""`accel.quantize`: quantize a graph, optionally within an accuracy budget.

With a budget, the backend's schemes are tried in the declared order, fastest first. Each is measured on the same rows as the float
artifact. If a scheme loses too much accuracy, its layers are ranked by the error that each causes alone, and the most harmful layers
are kept in float until the budget is met. Candidates within the budget are timed. The fastest one is written, with the table of all
attempts. If no candidate meets the budget, nothing is written.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..artifact.atomic_folder_writing import check_output, staging
from ..artifact.json_writing import finite
from ..artifact.manifest import Artifact
from ..backends import registry
from ..backends.plan import make_plan
from ..backends.stage_backend_selection import plan_stage
from ..config import QuantizeConfig, checked_arguments
from ..data.batches import calibration_batches, data_name
from ..errors import BudgetError, ConfigError, SessionError
from ..interfaces.protocols import Feeds
from ..interfaces.specs import WEIGHTS
from ..interfaces.task_registry import task_spec
from ..measuring.accuracy.evaluation import EvaluationData, EvaluationSet
from ..measuring.disturbance import MachineWatch
from ..measuring.latency.results import VariantResult, ratio_of
from ..measuring.latency.variants import Variant, process_path
from ..measuring.latency.workloads import WorkloadSettings
from ..models.base import ORTModel
from ..models.calibration_recording import PartCalibrationBatches
from ..stages.quantize import quantizable
from ..stages.quantize import quantize as quantize_once
from ..stages.resolution import resolve
from .candidates import Recipe, SearchSpace
from .float_layers import FloatLayerSearch, with_float_layers
from .search import Preset, Proposal, Search
from .search_data import SearchSubject, TimeBudget, TriedCandidate
from .store import ResultStore
from .trials import Constraints, Goal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One row of the search table.

    Attributes:
        scheme: Quantization scheme.
        settings: Settings of `QuantizeConfig` that differ from the defaults.
        float_layers: Names of layers that are kept in float.
        value: Metric of the quantized artifact; `None` if the attempt failed.
        drop: Points of the metric lost compared with the float artifact.
        drop_interval: Confidence interval of the drop, in points.
        agreement: Fraction of predictions that are equal to the float artifact's.
        inside: Whether the drop is within the budget.
        bytes: Total size of the quantized artifact's graph files, in bytes.
        median_ms: Median latency in milliseconds of a call of `batch_size` rows of median length, or of one token per row for
            language models; measured only for attempts within the budget.
        speedup: Speed-up over the float artifact, with its interval; see `accel.measuring.statistics.speedup`.
        seconds: Time to quantize and measure, in seconds.
        error: Reason why the attempt failed or was skipped; `None` if the attempt succeeded.
        chosen: Whether this attempt's artifact was written as the result.
        skipped: Whether the scheme was not tried, for the reason in `error`.
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
    skipped: bool = False

    def __str__(self) -> str:
        details = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        name = f"{self.scheme}{f' ({details})' if details else ''}"
        if self.float_layers:
            shown = ", ".join(self.float_layers[:3]) + (", ..." if len(self.float_layers) > 3 else "")
            name += f", {len(self.float_layers)} layers in float ({shown})"
        if self.drop is None:
            return f"{name}: {'not tried' if self.skipped else 'failed'}: {self.error}"
        speed = f", {self.median_ms:.2f} ms" if self.median_ms is not None else ""
        if self.speedup is not None:
            speed += f", times float {ratio_of(self.speedup)}"
        return f"{name}: loses {self.drop:.2f} points{speed}{' <- kept' if self.chosen else ''}"


@checked_arguments(artifact=(Artifact, str, os.PathLike), config=QuantizeConfig)
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
    batch_size: int = 1,
    max_length: int | None = None,
    measure_speed: bool = True,
    backend: str | None = None,
    config: QuantizeConfig | None = None,
    **settings: Any,
) -> Artifact:
    """Quantize a graph, optionally within an accuracy budget.

    Quantizing takes seconds, plus one pass over the calibration data for static schemes. A search takes one quantization and
    one evaluation for each row of its table. If layers must be ranked, each layer takes one quantization and one evaluation on 64 rows.

    Args:
        artifact: The artifact or its folder.
        out: Folder to create.
        calibration: Data for schemes that need activation ranges: a `datasets.Dataset`, a list of dictionaries, a CSV, JSON
            or Parquet file, the name of a data set on the Hub, or batches (dictionaries of tensors).
        method: Method that computes activation ranges from the data: `QuantizeConfig.calibration`. With `None`, a search tries
            the methods that the backend declares.
        max_drop: Accuracy budget: points of the metric (percentage points of accuracy) that may be lost on `data`. Searches
            all schemes that the backend declares, or only `scheme` if it is given.
        metric: Name of the metric; `None` for the task's default. See `accel.evaluate`.
        data: Labelled rows to measure accuracy on. Without `max_drop`, the accuracy of the result is measured and recorded.
        columns: Column names of `data` by use, for columns that cannot be inferred.
        calibration_columns: Column names of `calibration` by use; `None` for those in `columns`.
        split: Split of `data`.
        calibration_split: Split of `calibration`.
        rows: Maximum number of rows of `data`; `None` for all rows.
        batch_size: Number of rows in each call while accuracy and speed are measured; use the batch size of production. Dynamic
            quantization computes its ranges separately for each call, so both depend on it. Rows of similar length share a call.
        max_length: Number of tokens after which longer rows of `data` and `calibration` are truncated.
        measure_speed: Time all candidates within the budget and keep the fastest. If false, keep the first one within the
            budget, in the order of expected speed.
        backend: Backend that quantizes; `None` for the default backend of the artifact's format.
        config: Quantization settings; they may also be passed as keyword arguments (`scheme="static-int8"`).
        **settings: Fields of `QuantizeConfig`.

    Raises:
        BudgetError: No candidate is within the budget; the message lists all attempts.
        BackendUnavailableError: No available backend quantizes this format with this scheme.
        QuantizeError: Quantization failed, the artifact is already quantized, or calibration data is missing.
        InputError: The data has no rows or no labels, or its columns do not map.
    """
    watch = MachineWatch()
    chosen = QuantizeConfig.merged(config, settings)
    artifact = quantizable(artifact, backend, chosen.scheme)
    if method is not None:
        chosen = QuantizeConfig.from_dict({**chosen.to_dict(), "calibration": method})
    target = check_output(out, artifact.path)
    if max_drop is not None and not (max_drop >= 0 and math.isfinite(max_drop)):
        raise ConfigError(
            f"max_drop is {max_drop}, but it must be a finite number of at least 0: the points of the metric that may be lost.",
            fix="use a number such as 0.3.",
        )
    if max_drop is not None and data is None:
        raise ConfigError(
            f"max_drop is {max_drop}, but there is no data. An accuracy budget needs labelled rows to measure accuracy.",
            fix="pass data=... (--data FILE).",
        )
    if data is None and metric is not None:
        raise ConfigError(
            f"metric is {metric!r}, but there is no data. A metric needs labelled rows.",
            fix="pass data=... (--data FILE).",
        )
    batches: Iterable[Feeds] | None = None
    if calibration is not None:
        batches = calibration_batches(
            artifact,
            calibration,
            config=chosen,
            columns=calibration_columns if calibration_columns is not None else columns,
            split=calibration_split,
            max_length=max_length,
        )
        if task_spec(artifact.task).encoder_decoder and len(artifact.components) > 1:
            batches = PartCalibrationBatches(artifact, batches)
    if data is None:
        return quantize_once(artifact, target, calibration=batches, backend=backend, config=chosen)
    labelled = EvaluationData(
        data=data, metric=metric, columns=columns, split=split, samples=rows, seed=chosen.seed, batch_size=batch_size,
        max_length=max_length,
    )  # fmt: skip
    with ORTModel.from_plan(make_plan(artifact)) as model:
        prepared = EvaluationSet(labelled, model, task=artifact.task)
    searched = max_drop is not None and config is None and "scheme" not in settings
    root, recipes, skipped = _recipes(artifact, chosen, backend, calibrated=batches is not None, searched=searched)
    runs = backend is not None and registry.describe(backend).capability("run", artifact.format) is not None
    subject = _subject(artifact)
    with staging(target) as work:
        search = Search(
            subject=subject, data=prepared, calibration=batches,
            goal=Goal(objective="latency", constraints=Constraints(max_drop=max_drop)),
            load=WorkloadSettings(batch=(prepared.predictor.batch_size,), call=_median_rows(prepared, artifact.task)),
            store=ResultStore(work / "search"), clock=TimeBudget(limit_s=None), watch=watch, processes=0,
        )  # fmt: skip
        layers = FloatLayerSearch(search, subject, artifact, prepared, batches, backend if runs else None, work)
        try:
            search.builder.add(root, artifact)
            winner = search.run(_preset(search, layers, recipes, measure_speed=measure_speed))
            if winner is None and max_drop is None:
                raise next(iter(search.builder.errors.values()))
            if winner is None:
                raise _nothing_fits(
                    max_drop or 0.0, search, prepared, _table(layers, search) + skipped, data_name(data)
                )
        finally:
            search.close()
        result = _keep(winner, layers, search, prepared, skipped, max_drop, work)
    logger.info("kept %s", winner.candidate.recipe)
    return Artifact(target, result.manifest)


def _recipes(
    artifact: Artifact, config: QuantizeConfig, backend: str | None, *, calibrated: bool, searched: bool
) -> tuple[Recipe, list[Recipe], list[Attempt]]:
    """Return the artifact as a recipe, the recipes to try on it, and the schemes that are skipped.

    Args:
        artifact: The artifact to quantize.
        config: Settings that all recipes share.
        backend: Backend that quantizes; `None` for the default backend of the format.
        calibrated: Whether there is calibration data.
        searched: Return all schemes of the backend, fastest first, also with their declared settings to try. If false, return
            only the scheme of `config`.
    """
    plan = plan_stage("quantize", artifact.format, backend)
    spec, capability = plan.backend, plan.capability
    defaults = QuantizeConfig().to_dict()
    settings = {name: value for name, value in config.to_dict().items() if value != defaults[name] and name != "scheme"}
    root = Recipe(stage="export", backend=spec.name, format=artifact.format, setting=artifact.dtype)
    if not searched:
        produced = capability.produces or artifact.format
        step = Recipe(
            stage="quantize", backend=spec.name, format=produced, setting=config.scheme, settings=settings, parent=root
        )
        return root, [step], []
    space = SearchSpace(
        task=artifact.task, device=None, backends=[spec.name], half_exports=False, calibrated=calibrated
    )
    recipes = space.schemes(spec, capability, root, settings, same_speed=True)
    prefix = f"{spec.name}: "
    skipped = [s for s in space.skipped if s.name.startswith(prefix)]
    return root, recipes, [Attempt(scheme=s.name.removeprefix(prefix), error=s.reason, skipped=True) for s in skipped]


def _subject(artifact: Artifact) -> SearchSubject:
    """Return the subject of the search, whose baseline is the float artifact."""
    baseline = Variant(
        name="the float artifact",
        path=process_path(artifact),
        task=artifact.task,
        backend=plan_stage("export", WEIGHTS).backend.name if artifact.format == WEIGHTS else None,
    )
    return SearchSubject(model=resolve(artifact), baseline=baseline, digest=artifact.digest, reference=baseline.name)


def _median_rows(prepared: EvaluationSet, task: str) -> dict[str, Any]:
    """Return the inputs of a call of median length. Language models get one token per row, because generation mostly runs such calls."""
    plan = prepared.predictor.encoded.plan(prepared.predictor.batch_size)
    feeds = prepared.predictor.encoded.batch(plan[len(plan) // 2])
    if task_spec(task).generates:
        feeds = {name: value[:, :1] for name, value in feeds.items()}
    return {name: value.numpy() for name, value in feeds.items() if isinstance(value, torch.Tensor)}


def _preset(
    search: Search, layers: FloatLayerSearch, recipes: Sequence[Recipe], *, measure_speed: bool
) -> Preset[TriedCandidate | None]:
    """Try the recipes, time those within the budget next to the float artifact, and return the fastest (if equal, the simplest)."""
    yield from layers.proposals(recipes)
    fitting = layers.fitting
    if not fitting or not measure_speed:
        return fitting[0] if fitting else None
    yield Proposal(stage="time", action="time", items=fitting)
    winner = search.judge.best(search.judge.finals())
    if winner is None:
        raise SessionError(
            f"The quantized model {fitting[0].candidate.recipe} could not be timed: {fitting[0].reason}",
            fix="pass measure_speed=False to choose a recipe without timing.",
        )
    gain = search.judge.speedup(winner)
    if gain.equal or gain.value < 1:
        logger.warning(
            "The chosen quantized model is not faster than the float model: it takes %.2f ms per call, the float model %.2f ms (%s "
            "times as fast).",
            _median_ms(winner.last.result), _median_ms(winner.last.anchor), gain,
        )  # fmt: skip
    return winner


def _median_ms(result: VariantResult) -> float:
    return result.cells[0].latency.median


def _table(layers: FloatLayerSearch, search: Search, winner: TriedCandidate | None = None) -> list[Attempt]:
    """Return one row for each attempt, in order."""
    table = []
    for recipe, in_float, tried, seconds in layers.attempts:
        settings = {name: value for name, value in recipe.settings.items() if name not in ("samples", "seed")}
        attempt = Attempt(scheme=recipe.setting, settings=settings, float_layers=in_float, seconds=seconds)
        if tried is None:
            error = search.builder.errors[str(with_float_layers(recipe, in_float))]
            table.append(replace(attempt, error=error.message.splitlines()[0]))
            continue
        measured = tried.compared.in_a_table()
        attempt = replace(attempt, **measured, inside=search.fits(tried), bytes=tried.artifact.facts.bytes)
        if tried.final is not None:
            speedup = finite(asdict(search.judge.speedup(tried)))
            attempt = replace(attempt, median_ms=_median_ms(tried.final.result), speedup=speedup)
        table.append(replace(attempt, chosen=tried is winner))
    return table


def _keep(
    winner: TriedCandidate, layers: FloatLayerSearch, search: Search, prepared: EvaluationSet, skipped: Sequence[Attempt],
    max_drop: float | None, work: Path,
) -> Artifact:  # fmt: skip
    """Make the winner the only content of `work`, with the search table in its manifest."""
    artifact, reference, compared = Artifact.load(winner.artifact.path), search.grader.reference(), winner.compared
    for path in winner.artifact.path.iterdir():
        path.replace(work / path.name)
    shutil.rmtree(work / "search")
    step, batch_size = artifact.manifest.steps[-1], prepared.predictor.batch_size
    accuracy = {
        "metric": reference.metric,
        "value": compared.own,
        "float": reference.scored.value,
        "drop": compared.drop,
        "drop_interval": list(compared.drop_interval),
        "agreement": compared.agreement,
        "data": reference.data,
        "max_length": prepared.predictor.max_length,
        "batch_size": batch_size,
    }
    report = dict(step.report)
    if max_drop is not None:
        timed = winner.final
        report["search"] = {
            "max_drop": max_drop,
            "float_ms": _median_ms(timed.anchor) if timed is not None else None,
            "batch_size": batch_size,
            "disturbance": asdict(timed.disturbance) if timed is not None else None,
            "table": [asdict(attempt) for attempt in [*_table(layers, search, winner), *skipped]],
            "sensitivity": layers.sensitivity,
        }
    return Artifact(work, artifact.manifest).with_step(
        validation={**step.validation, "accuracy": accuracy}, report=report
    )


def _nothing_fits(
    max_drop: float, search: Search, prepared: EvaluationSet, table: Sequence[Attempt], data: str
) -> BudgetError:
    measured = [attempt for attempt in table if attempt.drop is not None]
    best = min(measured, key=lambda attempt: attempt.drop or 0.0, default=None)
    closest = f"The best attempt is {best}." if best is not None else "No recipe could be measured."
    lines = "\n".join(f"  {attempt}" for attempt in table)
    return BudgetError(
        f"Every quantization recipe loses more than {max_drop:g} points of {prepared.metric.name} on {data} ({prepared.at}). The "
        f"float model has {search.grader.reference().scored.value:.4f}. {closest} All attempts:\n{lines}",
        fix="use a larger max_drop, pass calibration data for static schemes, or use the float model.",
    )
