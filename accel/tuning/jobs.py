"""The steps of a search that run in a process of their own: building an artifact, opening one, measuring accuracy.

What crosses the border to the process and back is a dataclass; what is remembered of it is its JSON form.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..artifact.manifest import Artifact
from ..artifact.writing import discard
from ..backends import registry
from ..backends.sessions import RunSettings, open_artifact
from ..config import ExportConfig, OptimizeConfig, QuantizeConfig
from ..data.batches import calibration_batches, load_processor
from ..measuring.accuracy.comparing import Comparison, Scored
from ..measuring.accuracy.evaluation import EvaluationData, EvaluationSet, positions
from ..measuring.latency.variants import Variant, resolved_variant
from ..models.auto import close, open_model
from ..stages.export import export_resolved
from ..stages.optimize import optimize
from ..stages.quantize import quantize
from ..stages.resolution import Resolved, resolve
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
class Facts:
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
    recipe: Recipe, parent: Path | None, out: Path, source: Resolved, calibration: CalibrationData | None
) -> Facts:
    """Make the artifact of a recipe's last step.

    Args:
        recipe: What to make.
        parent: Artifact that it starts from; `None` for an export of the model.
        out: Folder to make.
        source: Model to export.
        calibration: For schemes that need it.
    """
    started = time.perf_counter()
    discard(out)
    if recipe.stage == "export":
        spec = registry.owner("export", recipe.format, recipe.backend)
        if parent is not None:
            source = resolve(parent, task=source.task, hub=source.hub, weights=True)
        artifact = export_resolved(source, out, spec=spec, config=ExportConfig.from_dict({"dtype": recipe.setting}))
    else:
        assert parent is not None
        artifact = _rewritten(recipe, Artifact.load(parent), out, calibration)
    component = artifact.components[0]
    return Facts(
        digest=artifact.digest,
        bytes=artifact.bytes,
        dtype=artifact.dtype,
        limits=dict(component.max_sizes),
        masked=any(spec.role == "mask" for spec in component.inputs),
        seconds=round(time.perf_counter() - started, 2),
    )


def _rewritten(recipe: Recipe, parent: Artifact, out: Path, calibration: CalibrationData | None) -> Artifact:
    if recipe.stage == "optimize":
        level = OptimizeConfig.from_dict({"level": recipe.setting, **recipe.settings})
        return optimize(parent, out, backend=recipe.backend, config=level)
    scheme = QuantizeConfig.from_dict({"scheme": recipe.setting, **recipe.settings})
    batches = None
    if calibration is not None:
        scheme = replace(scheme, samples=calibration.samples)
        batches = calibration_batches(
            parent, calibration.data, config=scheme, columns=calibration.columns, split=calibration.split,
            max_length=calibration.max_length,
        )  # fmt: skip
    return quantize(parent, out, calibration=batches, backend=recipe.backend, config=scheme)


def opens(path: Path, settings: RunSettings) -> None:
    """Open an artifact and close it again.

    Raises:
        AccelError: The backend refuses.
    """
    open_artifact(Artifact.load(path), settings).close()


def accuracy(
    variant: Variant, data: EvaluationData, reference: Scored | None, batch_sizes: Sequence[int] = ()
) -> Accuracy:
    """Measure a model on labelled rows.

    Args:
        variant: The model and the way to run it.
        data: The rows.
        reference: What PyTorch float32 scored on them, to compare with.
        batch_sizes: Rows a call, instead of `data.batch_size`. Several are measured one after the other, and the worst one counts.
    """
    resolved, settings = resolved_variant(variant)
    assert resolved.artifact is not None
    model = open_model(resolved, settings)
    try:
        processor = load_processor(variant.path, variant.task, trust_remote_code=variant.trust_remote_code)
        found = [
            _scored(model, replace(data, batch_size=size), reference, variant.task, processor, resolved.artifact)
            for size in batch_sizes or (data.batch_size,)
        ]
    finally:
        close(model)
    worst = max(found, key=lambda one: one.comparison.drop if one.comparison is not None else 0.0)
    seconds = sum(one.scored.seconds for one in found)
    by_batch = {str(one.batch_size): one.scored.value for one in found}
    return replace(worst, scored=replace(worst.scored, seconds=seconds), by_batch=by_batch)


def _scored(
    model: Any, data: EvaluationData, reference: Scored | None, task: str, processor: Any, artifact: Artifact
) -> Accuracy:
    """The accuracy with one number of rows a call."""
    prepared = EvaluationSet(
        data, task=task, config=model.config, processor=processor, limit=positions(artifact), folder=artifact.path
    )
    scored = prepared.measure(model)
    compared = None if reference is None else prepared.compare(scored, reference, "PyTorch float32")
    return Accuracy(
        metric=prepared.metric.name,
        higher_is_better=prepared.metric.higher_is_better,
        scored=scored if compared is None else replace(scored, predictions=()),
        rows=len(prepared.rows),
        data=prepared.rows.sample.to_dict(),
        comparison=compared,
        batch_size=prepared.predictor.batch_size,
    )
