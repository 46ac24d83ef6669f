"""`accel.quantize`: quantization with data in any form and, when asked, inside an accuracy budget.

The search tries the backend's schemes in the order that it declares them, fastest first, and measures each on the same
rows as the float artifact. Where a scheme loses too much, its layers are ranked by the error that each one causes alone,
and the most harmful go back to float until the budget holds. What fits is timed, and the fastest is kept, with the table
of everything tried. Nothing is written when nothing fits.
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

from ..artifact.manifest import Artifact
from ..artifact.writing import check_output, staging
from ..backends import registry
from ..backends.plan import make_plan
from ..config import QuantizeConfig, checked_arguments
from ..data.batches import calibration_batches, data_name, load_processor
from ..errors import BudgetError, ConfigError, QuantizeError, SessionError
from ..interfaces.protocols import Feeds
from ..interfaces.specs import WEIGHTS
from ..interfaces.task_registry import task_spec
from ..measuring.accuracy.evaluation import EvaluationData, EvaluationSet, positions
from ..measuring.disturbance import MachineWatch
from ..measuring.latency.results import VariantResult, ratio_of, without_infinity
from ..measuring.latency.variants import Variant, process_path
from ..measuring.latency.workloads import Load
from ..models.base import ORTModel
from ..models.decoder_batches import PartBatches
from ..stages.quantize import quantizable
from ..stages.quantize import quantize as quantize_once
from ..stages.resolution import resolve
from .candidates import Recipe, Space
from .float_layers import FloatLayers
from .search import Search
from .store import Store
from .subject import Clock, Subject, Tried
from .trials import Constraints, Goal

logger = logging.getLogger(__name__)


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
        batch_size: Rows a call when accuracy and speed are measured: as many as the model will get. Dynamic quantization finds its
            ranges call by call, so both depend on it. Rows of like length share a call.
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
    watch = MachineWatch()
    artifact = quantizable(artifact, backend)
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
            batches = PartBatches(artifact, batches)
    if data is None:
        return quantize_once(artifact, target, calibration=batches, backend=backend, config=chosen)
    prepared = _evaluation_set(
        artifact,
        EvaluationData(
            data=data, metric=metric, columns=columns, split=split, samples=rows, seed=chosen.seed,
            batch_size=batch_size, max_length=max_length,
        ),
    )  # fmt: skip
    searched = max_drop is not None and config is None and "scheme" not in settings
    root, recipes, skipped = _recipes(artifact, chosen, backend, calibrated=batches is not None, searched=searched)
    runs = backend is not None and registry.describe(backend).capability("run", artifact.format) is not None
    subject = _subject(artifact)
    with staging(target) as work:
        search = Search(
            subject=subject, data=prepared, calibration=batches,
            goal=Goal(objective="latency", constraints=Constraints(max_drop=max_drop)),
            load=Load(batch=(prepared.predictor.batch_size,), call=_median_rows(prepared, artifact.task)),
            store=Store(work / "search"), clock=Clock(limit_s=None), watch=watch, processes=0,
        )  # fmt: skip
        layers = FloatLayers(search, subject, artifact, prepared, batches, backend if runs else None, work)
        try:
            search.builder.add(root, artifact)
            search.grader.begin()
            layers.run(recipes)
            if not layers.fitting and max_drop is None:
                raise next(iter(search.builder.errors.values()))
            if not layers.fitting:
                raise _nothing_fits(
                    max_drop or 0.0, search, prepared, _table(layers, search) + skipped, data_name(data)
                )
            winner = _fastest(search, layers.fitting) if measure_speed else layers.fitting[0]
        finally:
            search.close()
        made = _keep(winner, layers, search, prepared, skipped, max_drop, work)
    logger.info("kept %s", winner.candidate.recipe)
    return Artifact(target, made.manifest)


def _refuse_quantized(artifact: Artifact) -> None:
    if artifact.manifest.quantization is not None:
        raise QuantizeError(
            f"{artifact.path} is quantized already ({artifact.manifest.quantization.scheme}).",
            fix="quantize the artifact that it was made from.",
        )


def _recipes(
    artifact: Artifact, config: QuantizeConfig, backend: str | None, *, calibrated: bool, searched: bool
) -> tuple[Recipe, list[Recipe], list[Attempt]]:
    """Return the artifact as a recipe, the recipes to try on it, and the schemes that are skipped.

    Args:
        artifact: What is quantized.
        config: Settings that all share.
        backend: Who quantizes.
        calibrated: Whether there is calibration data.
        searched: All schemes of the backend, fastest first, with the settings that are worth a try; else the scheme of `config`.
    """
    spec = registry.owner("quantize", artifact.format, backend)
    capability = spec.capability("quantize", artifact.format)
    assert capability is not None, "an owner has the capability"
    defaults = QuantizeConfig().to_dict()
    settings = {name: value for name, value in config.to_dict().items() if value != defaults[name] and name != "scheme"}
    root = Recipe(stage="export", backend=spec.name, format=artifact.format, setting=artifact.dtype)
    if not searched:
        made = capability.produces or artifact.format
        step = Recipe(
            stage="quantize", backend=spec.name, format=made, setting=config.scheme, settings=settings, parent=root
        )
        return root, [step], []
    space = Space(task=artifact.task, device=None, backends=[spec.name], half_exports=False, calibrated=calibrated)
    recipes = space.schemes(spec, capability, root, settings, same_speed=True)
    skipped = [one for one in space.skipped if one.name.startswith(f"{spec.name}: ")]
    return root, recipes, [Attempt(scheme=one.name.removeprefix(f"{spec.name}: "), error=one.reason) for one in skipped]


def _evaluation_set(artifact: Artifact, data: EvaluationData) -> EvaluationSet:
    model = ORTModel.from_plan(make_plan(artifact))
    try:
        return EvaluationSet(
            data,
            task=artifact.task,
            config=model.config,
            processor=load_processor(artifact.path, artifact.task),
            limit=positions(artifact),
            folder=artifact.path,
        )
    finally:
        model.close()


def _subject(artifact: Artifact) -> Subject:
    """Compare every candidate with the float artifact."""
    baseline = Variant(
        name="the float artifact",
        path=process_path(artifact),
        task=artifact.task,
        backend=registry.owner("export", WEIGHTS).name if artifact.format == WEIGHTS else None,
    )
    return Subject(model=resolve(artifact), baseline=baseline, digest=artifact.digest, reference=baseline.name)


def _median_rows(prepared: EvaluationSet, task: str) -> dict[str, Any]:
    """Return the inputs of a call of median length; for language models one token a row, because generation spends its time there."""
    plan = prepared.predictor.encoded.plan(prepared.predictor.batch_size)
    feeds = prepared.predictor.encoded.batch(plan[len(plan) // 2])
    if task_spec(task).generates:
        feeds = {name: value[:, :1] for name, value in feeds.items()}
    return {name: value.numpy() for name, value in feeds.items() if isinstance(value, torch.Tensor)}


def _fastest(search: Search, fitting: Sequence[Tried]) -> Tried:
    """Time what fits next to the float artifact, and choose the fastest; of equally fast ones the simplest."""
    search.timer.finals(fitting)
    winner = search.judge.best(search.judge.finals())
    if winner is None:
        raise SessionError(fitting[0].reason, fix="run it alone to see why.")
    gain = search.judge.speedup(winner)
    if gain.equal or gain.value < 1:
        logger.warning(
            "The recipe kept inside the budget takes %.2f ms, the float artifact %.2f (%s times as fast): it is smaller, not "
            "faster.",
            _median_ms(winner.last.result), _median_ms(winner.last.anchor), gain,
        )  # fmt: skip
    return winner


def _median_ms(result: VariantResult) -> float:
    return result.cells[0].latency.median


def _table(layers: FloatLayers, search: Search, winner: Tried | None = None) -> list[Attempt]:
    """Return a row for each attempt, in order."""
    table = []
    for recipe, in_float, tried, seconds in layers.attempts:
        settings = {name: value for name, value in recipe.settings.items() if name not in ("samples", "seed")}
        attempt = Attempt(scheme=recipe.setting, settings=settings, float_layers=in_float, seconds=seconds)
        if tried is None:
            exclude = {"exclude": (*settings.get("exclude", ()), *in_float)} if in_float else {}
            failed = str(replace(recipe, settings={**recipe.settings, **exclude}))
            table.append(replace(attempt, error=search.builder.errors[failed].message.splitlines()[0]))
            continue
        assert tried.found is not None
        assert tried.found.comparison is not None
        attempt = replace(
            attempt, **tried.found.comparison.in_a_table(), inside=search.fits(tried), bytes=tried.made.facts.bytes
        )
        if tried.final is not None:
            speedup = without_infinity(asdict(search.judge.speedup(tried)))
            attempt = replace(attempt, median_ms=_median_ms(tried.final.result), speedup=speedup)
        table.append(replace(attempt, chosen=tried is winner))
    return table


def _keep(
    winner: Tried, layers: FloatLayers, search: Search, prepared: EvaluationSet, skipped: Sequence[Attempt],
    max_drop: float | None, work: Path,
) -> Artifact:  # fmt: skip
    """Make the winner the only content of `work`, with the search table in its manifest."""
    made, reference, found = Artifact.load(winner.made.path), search.grader.reference(), winner.found
    assert found is not None
    assert found.comparison is not None
    for path in winner.made.path.iterdir():
        path.replace(work / path.name)
    shutil.rmtree(work / "search")
    step, batch_size = made.manifest.steps[-1], prepared.predictor.batch_size
    accuracy = {
        "metric": found.metric,
        "value": found.scored.value,
        "float": reference.scored.value,
        "drop": found.comparison.drop,
        "drop_interval": list(found.comparison.drop_interval),
        "agreement": found.comparison.agreement,
        "data": found.data,
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
            "table": [asdict(one) for one in [*_table(layers, search, winner), *skipped]],
            "sensitivity": layers.sensitivity,
        }
    moved = Artifact(work, made.manifest)
    return moved.with_step(validation={**step.validation, "accuracy": accuracy}, report=report)


def _nothing_fits(
    max_drop: float, search: Search, prepared: EvaluationSet, table: Sequence[Attempt], data: str
) -> BudgetError:
    measured = [attempt for attempt in table if attempt.drop is not None]
    best = min(measured, key=lambda attempt: attempt.drop or 0.0, default=None)
    found = f"The best found is {best}." if best is not None else "No recipe could be measured."
    lines = "\n".join(f"  {attempt}" for attempt in table)
    return BudgetError(
        f"No recipe loses at most {max_drop:g} points of {prepared.metric.name} on {data} at "
        f"{prepared.at}, where the float artifact has {search.grader.reference().scored.value:.4f}. {found} Tried:\n{lines}",
        fix="allow a larger max_drop, give calibration data for static schemes, or keep the float artifact.",
    )
