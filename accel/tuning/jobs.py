"""Steps of a search: build an artifact, and measure accuracy. `tune` runs these steps in separate processes.

Arguments and results are dataclasses, because they are sent between processes; the store writes them as JSON.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..artifact.atomic_folder_writing import discard
from ..artifact.manifest import Artifact
from ..artifact.resolved_model import ResolvedModel
from ..backends.stage_backend_selection import plan_stage
from ..config import ExportConfig, OptimizeConfig, QuantizeConfig
from ..data.batches import calibration_batches
from ..interfaces.protocols import Feeds
from ..measuring.accuracy.comparison import Comparison, ScoredRows
from ..measuring.accuracy.evaluation import EvaluationData, EvaluationSet
from ..measuring.latency.variants import Variant, planned_variant
from ..models.base import ORTModel
from ..stages.checked_export import export_resolved
from ..stages.optimize import optimize
from ..stages.quantize import quantize
from ..stages.resolution import resolve
from .candidates import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationData:
    """Calibration rows for schemes that need activation ranges.

    Attributes:
        data: The rows, in any form that `accel.quantize` accepts.
        columns: Column names by use.
        split: Split of a Hub data set.
        max_length: Number of tokens after which longer rows are truncated.
        samples: Maximum number of rows.
    """

    data: Any
    columns: Mapping[str, str] | None = None
    split: str | None = None
    max_length: int | None = None
    samples: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactFacts:
    """Facts about an artifact that a search needs.

    Attributes:
        digest: Digest of the artifact's files.
        bytes: Total size of the artifact's files, in bytes.
        dtype: Data type that the graph uses for computation.
        limits: Maximum sizes of named axes.
        masked: Whether the graph has an attention mask input.
        seconds: Time to build the artifact, in seconds.
    """

    digest: str
    bytes: int
    dtype: str
    limits: Mapping[str, int]
    masked: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Accuracy of a model on the rows of a search.

    Attributes:
        metric: Name of the metric.
        higher_is_better: Whether larger values are better.
        scored: Value and predictions; without predictions if they have already been compared.
        rows: Number of rows.
        data: The sample of rows; see `accel.data.rows.SampledRowsRecord`.
        comparison: Comparison with the baseline; `None` for the baseline itself.
        batch_size: Number of rows in each call; if several batch sizes were measured, the one with the largest drop.
        by_batch: Value of the metric for each batch size.
    """

    metric: str
    higher_is_better: bool
    scored: ScoredRows
    rows: int
    data: Mapping[str, Any]
    comparison: Comparison | None = None
    batch_size: int = 0
    by_batch: Mapping[str, float] = field(default_factory=dict)


def build(
    recipe: Recipe,
    parent: Path | Artifact | None,
    out: Path,
    source: ResolvedModel,
    calibration: CalibrationData | Iterable[Feeds] | None,
) -> ArtifactFacts:
    """Build the artifact of a recipe's last step.

    Args:
        recipe: The recipe.
        parent: Artifact that the step starts from; `None` for an export of the model.
        out: Folder to create.
        source: The model to export.
        calibration: Rows, or batches of inputs, for schemes that need activation ranges.
    """
    started = time.perf_counter()
    discard(out)
    if recipe.stage == "export":
        if isinstance(parent, Path):
            source = resolve(parent, task=source.task, hub=source.hub, weights=True)
        config = ExportConfig.from_dict({"dtype": recipe.setting, **recipe.settings})
        artifact = export_resolved(source, out, plan=plan_stage("export", recipe.format, recipe.backend), config=config)
    else:
        assert parent is not None
        artifact = _rewritten(recipe, Artifact.load(parent) if isinstance(parent, Path) else parent, out, calibration)
    return facts_of(artifact, time.perf_counter() - started)


def facts_of(artifact: Artifact, seconds: float = 0.0) -> ArtifactFacts:
    """Return the facts about an artifact that a search needs."""
    component = artifact.components[0]
    return ArtifactFacts(
        digest=artifact.digest,
        bytes=artifact.bytes,
        dtype=artifact.dtype,
        limits=dict(component.max_sizes),
        masked=any(spec.role == "mask" for spec in component.inputs),
        seconds=round(seconds, 2),
    )


def _rewritten(
    recipe: Recipe, parent: Artifact, out: Path, calibration: CalibrationData | Iterable[Feeds] | None
) -> Artifact:
    if recipe.stage == "optimize":
        level = OptimizeConfig.from_dict({"level": recipe.setting, **recipe.settings})
        return optimize(parent, out, backend=recipe.backend, config=level)
    scheme = QuantizeConfig.from_dict({"scheme": recipe.setting, **recipe.settings})
    if isinstance(calibration, CalibrationData):
        scheme = replace(scheme, samples=calibration.samples)
        calibration = calibration_batches(
            parent, calibration.data, config=scheme, columns=calibration.columns, split=calibration.split,
            max_length=calibration.max_length,
        )  # fmt: skip
    return quantize(parent, out, calibration=calibration, backend=recipe.backend, config=scheme)


def accuracy(
    variant: Variant,
    data: EvaluationData | EvaluationSet,
    reference: tuple[str, ScoredRows] | None,
    batch_sizes: Sequence[int] = (),
) -> Accuracy:
    """Measure the accuracy of a model on labelled rows.

    Args:
        variant: The model and the way to run it.
        data: The rows, or a prepared set of rows.
        reference: Name and scores of the model to compare with.
        batch_sizes: Batch sizes, which replace `data.batch_size`. They are measured one after the other, and the result with the
            largest drop is returned.
    """
    model = ORTModel.from_plan(planned_variant(variant))
    try:
        if isinstance(data, EvaluationSet):
            sets: Iterable[EvaluationSet] = (data,)
        else:
            sizes = batch_sizes or (data.batch_size,)
            sets = (EvaluationSet(replace(data, batch_size=size), model, task=variant.task) for size in sizes)
        results = [_scored(model, prepared, reference, variant.name) for prepared in sets]
    finally:
        model.close()
    worst = max(results, key=lambda result: result.comparison.drop if result.comparison is not None else 0.0)
    seconds = sum(result.scored.seconds for result in results)
    by_batch = {str(result.batch_size): result.scored.value for result in results}
    return replace(worst, scored=replace(worst.scored, seconds=seconds), by_batch=by_batch)


def _scored(model: Any, prepared: EvaluationSet, reference: tuple[str, ScoredRows] | None, name: str) -> Accuracy:
    """Measure the accuracy with one batch size."""
    scored = prepared.measure(model, f"measuring accuracy: {name}")
    compared = None if reference is None else prepared.compare(scored, reference[1], reference[0])
    return Accuracy(
        metric=prepared.metric.name,
        higher_is_better=prepared.metric.higher_is_better,
        scored=scored if compared is None else replace(scored, predictions=()),
        rows=len(prepared.rows),
        data=prepared.rows.sample.to_dict(),
        comparison=compared,
        batch_size=prepared.predictor.batch_size,
    )
