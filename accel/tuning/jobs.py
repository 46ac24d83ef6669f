"""Steps of a search: build an artifact, open one, measure accuracy. `tune` runs them in processes of their own.

Arguments and answers that cross the border to a process are dataclasses; a store keeps their JSON form.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..artifact.manifest import Artifact
from ..artifact.resolved_model import Resolved
from ..artifact.writing import discard
from ..backends import registry
from ..backends.plan import RunSettings, make_plan
from ..backends.sessions import open_plan
from ..config import ExportConfig, OptimizeConfig, QuantizeConfig
from ..data.batches import calibration_batches, load_processor
from ..interfaces.protocols import Feeds
from ..measuring.accuracy.comparison import Comparison, Scored
from ..measuring.accuracy.evaluation import EvaluationData, EvaluationSet, positions
from ..measuring.latency.variants import Variant, planned_variant
from ..models.base import ORTModel
from ..stages.export import export_resolved
from ..stages.optimize import optimize
from ..stages.quantize import quantize
from ..stages.resolution import resolve
from .candidates import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationData:
    """Rows for schemes that need activation ranges.

    Attributes:
        data: As for `accel.quantize`.
        columns: Column by use.
        split: Of a Hub data set.
        max_length: Tokens that longer rows are cut to.
        samples: Rows at most.
    """

    data: Any
    columns: Mapping[str, str] | None = None
    split: str | None = None
    max_length: int | None = None
    samples: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactFacts:
    """What a search needs to know about an artifact.

    Attributes:
        digest: Of the artifact.
        bytes: Of its files.
        dtype: That it computes in.
        limits: Largest sizes of named axes.
        masked: Whether it takes a mask.
        seconds: That it took to make.
    """

    digest: str
    bytes: int
    dtype: str
    limits: Mapping[str, int]
    masked: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How good a model is on the rows of a search.

    Attributes:
        metric: Its name.
        higher_is_better: Whether larger values are better.
        scored: Value and predictions; without predictions where they are compared already.
        rows: How many.
        data: Which ones.
        comparison: With PyTorch float32; `None` for that one itself.
        batch_size: Rows a call; where the workload has several, the one that loses most.
        by_batch: The metric by rows a call, for each of the workload's.
    """

    metric: str
    higher_is_better: bool
    scored: Scored
    rows: int
    data: Mapping[str, Any]
    comparison: Comparison | None = None
    batch_size: int = 0
    by_batch: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Accuracy:
        """From `to_dict` and JSON."""
        comparison = values["comparison"]
        return cls(
            **{
                **values,
                "scored": Scored.from_dict(values["scored"]),
                "comparison": Comparison.from_dict(comparison) if comparison is not None else None,
            }
        )


def build(
    recipe: Recipe,
    parent: Path | Artifact | None,
    out: Path,
    source: Resolved,
    calibration: CalibrationData | Iterable[Feeds] | None,
) -> ArtifactFacts:
    """Make the artifact of a recipe's last step.

    Args:
        recipe: What to make.
        parent: Artifact that it starts from; `None` for an export of the model.
        out: Folder to make.
        source: Model to export.
        calibration: Rows, or batches of inputs, for schemes that need them.
    """
    started = time.perf_counter()
    discard(out)
    if recipe.stage == "export":
        spec = registry.owner("export", recipe.format, recipe.backend)
        if isinstance(parent, Path):
            source = resolve(parent, task=source.task, hub=source.hub, weights=True)
        config = ExportConfig.from_dict({"dtype": recipe.setting, **recipe.settings})
        artifact = export_resolved(source, out, spec=spec, config=config)
    else:
        assert parent is not None
        artifact = _rewritten(recipe, Artifact.load(parent) if isinstance(parent, Path) else parent, out, calibration)
    return facts_of(artifact, time.perf_counter() - started)


def facts_of(artifact: Artifact, seconds: float = 0.0) -> ArtifactFacts:
    """What a search needs to know about an artifact that took so long to make."""
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


def opens(path: Path, settings: RunSettings) -> None:
    """Open an artifact and close it again.

    Raises:
        AccelError: The backend refuses.
    """
    open_plan(make_plan(Artifact.load(path), settings)).close()


def accuracy(
    variant: Variant,
    data: EvaluationData | EvaluationSet,
    reference: tuple[str, Scored] | None,
    batch_sizes: Sequence[int] = (),
) -> Accuracy:
    """Measure a model on labelled rows.

    Args:
        variant: The model and the way to run it.
        data: The rows, or the set that was made of them.
        reference: Name and scores of the model to compare with.
        batch_sizes: Rows a call, instead of `data.batch_size`. Several are measured one after the other, and the worst one counts.
    """
    model = ORTModel.from_plan(planned_variant(variant))
    try:
        if isinstance(data, EvaluationSet):
            sets: Iterable[EvaluationSet] = (data,)
        else:
            folder = model.artifact.path
            processor = load_processor(folder, variant.task, trust_remote_code=variant.trust_remote_code)
            limit = positions(model.artifact)
            sets = (
                EvaluationSet(
                    replace(data, batch_size=size), task=variant.task, config=model.config, processor=processor,
                    limit=limit, folder=folder,
                )
                for size in batch_sizes or (data.batch_size,)
            )  # fmt: skip
        found = [_scored(model, prepared, reference, variant.name) for prepared in sets]
    finally:
        model.close()
    worst = max(found, key=lambda one: one.comparison.drop if one.comparison is not None else 0.0)
    seconds = sum(one.scored.seconds for one in found)
    by_batch = {str(one.batch_size): one.scored.value for one in found}
    return replace(worst, scored=replace(worst.scored, seconds=seconds), by_batch=by_batch)


def _scored(model: Any, prepared: EvaluationSet, reference: tuple[str, Scored] | None, name: str) -> Accuracy:
    """The accuracy with one number of rows a call."""
    scored = prepared.measure(model, f"measuring {name}")
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
