"""`accel.evaluate`: how good a model is on labelled data, and how it compares with its PyTorch original on the same rows."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...artifact.hub import HubOptions
from ...artifact.manifest import Artifact
from ...artifact.resolved_model import Resolved
from ...backends.plan import RunSettings, make_plan
from ...config import SessionOptions, check_number, checked_arguments
from ...data.batches import BATCH_SIZE, load_processor
from ...data.columns import map_columns
from ...data.rows import Rows, load_rows, take
from ...errors import ConfigError, InputError
from ...interfaces.task_registry import task_spec
from ...models.base import ORTModel
from ...stages.export import weights_of
from ...stages.resolution import original, recorded_export, resolve
from .comparison import Comparison, Scored, compare
from .metrics import Metric
from .predictors import Model, Predictor, metric_for, predictor_for

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured.

    Attributes:
        metric: Its name.
        value: On the scale that the `evaluate` library gives it.
        scores: All that the metric returns.
        task: Of the model.
        rows: How many were measured.
        data: Which ones; see `accel.data.rows.Sample`.
        backend: What ran the model; `pytorch` for a PyTorch model.
        compute_dtype: What its kernels computed in.
        batch_size: Rows a call; dynamic quantization finds its ranges call by call, so the metric depends on it.
        max_length: Tokens that longer rows were cut to.
        seconds: For running the model over the rows.
        comparison: With the original, when asked for.
        predictions: One a row: a class, tags, an answer, a number or a `metrics.TokenScores`.
    """

    metric: str
    value: float
    scores: Mapping[str, float]
    task: str
    rows: int
    data: Mapping[str, Any]
    backend: str
    compute_dtype: str
    batch_size: int
    max_length: int | None
    seconds: float
    comparison: Comparison | None = None
    predictions: tuple[Any, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, without the predictions."""
        values = asdict(replace(self, predictions=()))
        del values["predictions"]
        if values["comparison"] is not None:
            # They stand one level higher.
            del values["comparison"]["own"], values["comparison"]["rows"]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """Which rows are measured, and how.

    Attributes:
        data: Whatever `accel.data.rows.load_rows` reads.
        metric: The default of what the models predict when `None`.
        columns: Column by use, where it cannot be inferred.
        split, revision, token: Of a Hub data set.
        samples: Rows at most.
        seed: Of the choice of rows.
        batch_size: Rows a call.
        by_length: Whether rows of like length share a call, as in the server; otherwise rows share one in the order given, and are
            padded to the longest.
        max_length: Tokens that longer rows are cut to.
        trust_remote_code: Allow a metric of a Hub user.
    """

    data: Any
    metric: str | None = None
    columns: Mapping[str, str] | None = None
    split: str | None = None
    revision: str | None = None
    token: str | bool | None = None
    samples: int | None = None
    seed: int = 0
    batch_size: int = BATCH_SIZE
    by_length: bool = True
    max_length: int | None = None
    trust_remote_code: bool = False


class EvaluationSet:
    """Rows, references and a metric, prepared once for models of one task; measures any number of them.

    Attributes:
        task: Of the models.
        metric: What is measured.
        rows: The rows, their columns mapped.
        predictor: The rows as inputs, and what makes predictions.
    """

    def __init__(
        self,
        given: EvaluationData,
        *,
        task: str,
        config: Any,
        processor: Any,
        limit: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """Read, map, label and tokenize.

        Args:
            given: Which rows, and how.
            task: Of the models.
            config: Their transformers config, for labels.
            processor: Their tokenizer or image processor.
            limit: The models' positions.
            folder: Holds the files that say how texts are read and outputs compared, where there is one.
        """
        check_number("batch_size", given.batch_size, 1)
        self.task = task_spec(task).name
        kind = predictor_for(self.task, config)
        # The metric first: a mistyped name should not cost a download.
        self.metric: Metric = metric_for(
            given.metric,
            kind,
            classes=int(getattr(config, "num_labels", 2)),
            trust_remote_code=given.trust_remote_code,
        )
        loaded = load_rows(given.data, split=given.split, revision=given.revision, token=given.token)
        self.rows: Rows = take(map_columns(loaded, self.task, given.columns), given.samples, given.seed)
        self.predictor: Predictor = kind(
            self.rows,
            task=self.task,
            config=config,
            processor=processor,
            max_length=given.max_length,
            limit=limit,
            batch_size=given.batch_size,
            folder=folder,
            by_length=given.by_length,
        )

    @property
    def at(self) -> str:
        """In words, how many rows share a call."""
        return rows_a_call([self.predictor.batch_size])

    def measure(self, model: Model, what: str = "evaluating") -> Scored:
        """Run a model over all rows.

        Raises:
            InputError: The metric is not a number: all predictions are alike, or not finite.
        """
        started = time.perf_counter()
        predictions = self.predictor.predict(model, what)
        seconds = time.perf_counter() - started
        scores = dict(self.metric.compute(predictions, self.predictor.references))
        value = scores[self.metric.key]
        if not math.isfinite(value):
            raise InputError(
                f"{self.metric.name} is {value}: the predictions or the references are all alike, or not finite.",
                fix="measure more rows, or with another metric.",
            )
        return Scored(value=value, scores=scores, predictions=tuple(predictions), seconds=seconds)

    def compare(self, scored: Scored, other: Scored, name: str, confidence: float = 0.95) -> Comparison:
        """A model beside the one called `name`, both measured on these rows."""
        return compare(
            self.metric,
            other,
            scored,
            self.predictor.references,
            against=name,
            agreement=self.predictor.agreement(other.predictions, scored.predictions),
            confidence=confidence,
        )


@checked_arguments(device=str, session_options=SessionOptions)
def evaluate(
    model: str | os.PathLike[str] | Artifact | Model,
    data: Any,
    *,
    metric: str | None = None,
    against: bool | str | os.PathLike[str] | Artifact | Model | None = None,
    task: str | None = None,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    data_revision: str | None = None,
    samples: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    max_length: int | None = None,
    processor: Any = None,
    confidence: float = 0.95,
    backend: str | None = None,
    device: str | None = None,
    session_options: SessionOptions | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
) -> Evaluation:
    """Measure a model on labelled data and, when asked, compare it with another one on the same rows.

    Rows of like length share a batch. MiniLM on the 3,080 queries of BANKING77 takes a few seconds on two cores.

    Args:
        model: An artifact, a folder or Hub id (exported where needed), one of our models or a PyTorch one.
        data: A `datasets.Dataset`, a list of dictionaries, a CSV, JSON or Parquet file, or the name of a data set on the
            Hub.
        metric: `accuracy`, `f1`, `precision`, `recall`, `matthews_correlation`, `seqeval`, `squad`, `exact_match`,
            `spearmanr`, `pearsonr`, `mse`, `perplexity` and those of images (`map`, `mean_iou`, `abs_rel`, `psnr`, ...) work
            offline; other names go to the `evaluate` library. The task's default
            when `None`.
        against: `True` compares with the PyTorch model that the artifact was made from; or another model.
        task: Of a PyTorch model whose class does not tell.
        columns: Column by use (`{"text": "query", "label": "intent"}`) where it cannot be inferred.
        split: Split of the data.
        data_revision: Of a data set on the Hub.
        samples: Rows at most; all when `None`.
        seed: Of the choice of rows.
        batch_size: Rows a call. When `None`: as many as the artifact's manifest says that its accuracy was measured with, else 1
            for a dynamically quantized artifact, whose answers depend on what shares a call, and 32 for any other model.
        max_length: Tokens that longer rows are cut to; the model's limit when `None`. Of text generation, the tokens of
            the windows that rows are split into; 512 when `None`.
        processor: Tokenizer or image processor; the model's own when `None`.
        confidence: Of the interval of the difference.
        backend, device, session_options: How the model is run; see `from_pretrained`.
        revision, token, trust_remote_code: As in transformers.

    Raises:
        InputError: No rows, no labels, columns that do not map, or labels that the model does not know.
        ConfigError: An unknown metric, split or column.
        ArtifactNotFoundError: The model, its original or the data is not to be found.
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence is {confidence}.", fix="use a number between 0 and 1, such as 0.95.")
    hub = HubOptions(revision=revision, token=token, trust_remote_code=trust_remote_code)
    run = RunSettings(backend=backend, device=device, options=session_options)
    resolved = resolve(model, task=task, hub=hub)
    opened: Model = (
        _at_hand(model, run)
        if isinstance(model, ORTModel | torch.nn.Module)
        else ORTModel.from_plan(make_plan(resolved, run))
    )
    try:
        usual, by_length = _usual_calls(opened.artifact) if isinstance(opened, ORTModel) else (BATCH_SIZE, True)
        given = EvaluationData(
            data=data, metric=metric, columns=columns, split=split, revision=data_revision, token=token, samples=samples,
            seed=seed, batch_size=usual if batch_size is None else batch_size, by_length=by_length, max_length=max_length,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        prepared = EvaluationSet(
            given,
            task=resolved.task,
            config=opened.config,
            processor=processor or _processor(opened, resolved.task, trust_remote_code),
            limit=positions(opened.artifact) if isinstance(opened, ORTModel) else None,
            folder=_folder(opened),
        )
        other, name = _other(against, resolved)
        scored = prepared.measure(opened)
        comparison = None
        if other is not None:
            comparison = prepared.compare(scored, prepared.measure(other, f"evaluating {name}"), name, confidence)
            if other is not against and isinstance(other, ORTModel):
                other.close()
        logger.info("%s %.4f on %d rows", prepared.metric.name, scored.value, len(prepared.rows))
        return Evaluation(
            metric=prepared.metric.name,
            value=scored.value,
            scores=scored.scores,
            task=resolved.task,
            rows=len(prepared.rows),
            data=prepared.rows.sample.to_dict(),
            backend=opened.backend if isinstance(opened, ORTModel) else "pytorch",
            compute_dtype=_compute_dtype(opened),
            batch_size=prepared.predictor.batch_size,
            max_length=prepared.predictor.max_length,
            seconds=round(scored.seconds, 3),
            comparison=comparison,
            predictions=scored.predictions,
        )
    finally:
        if opened is not model and isinstance(opened, ORTModel):
            opened.close()


def rows_a_call(batch_sizes: Sequence[int]) -> str:
    """In words, how many rows share a call when accuracy is measured."""
    sizes = " and ".join(str(size) for size in batch_sizes)
    return f"{sizes} {'row' if list(batch_sizes) == [1] else 'rows'} a call"


def _usual_calls(artifact: Artifact) -> tuple[int, bool]:
    """Rows of a call, and whether they are of like length, as the artifact's accuracy was measured before."""
    manifest = artifact.manifest
    measured = [manifest.run.measured] if manifest.run is not None else []
    measured += [step.validation["accuracy"] for step in reversed(manifest.steps) if "accuracy" in step.validation]
    for record in measured:
        if "batch_size" in record:
            return int(record["batch_size"]), bool(record.get("by_length", True))
    dynamic = manifest.quantization is not None and manifest.quantization.scheme.startswith("dynamic")
    return 1 if dynamic else BATCH_SIZE, True


def positions(artifact: Artifact) -> int | None:
    """Tokens that a model of this artifact reads at most, where its config tells."""
    sizes = artifact.components[0].max_sizes
    return sizes.get("sequence", sizes.get("total"))


def _at_hand(model: Model, run: RunSettings) -> Model:
    """A model that is open already.

    Raises:
        ConfigError: It should be opened in another way.
    """
    if run != RunSettings():
        raise ConfigError(
            "backend, device and session_options are for a model given by id or folder.",
            fix="load the model with them.",
        )
    return model.eval()


def _compute_dtype(model: Model) -> str:
    if isinstance(model, ORTModel):
        return model.compute_dtype
    return str(next((p.dtype for p in model.parameters() if p.is_floating_point()), "float32")).removeprefix("torch.")


def _processor(model: Model, task: str, trust_remote_code: bool) -> Any:
    folder = _folder(model)
    if folder is None:
        raise ConfigError("A PyTorch model comes without its tokenizer or processor.", fix="pass processor=...")
    return load_processor(folder, task, trust_remote_code=trust_remote_code)


def _folder(model: Model) -> Path | None:
    """The folder of a model's files: the artifact's, or the one that a PyTorch model was loaded from."""
    if isinstance(model, ORTModel):
        return model.artifact.path
    name = getattr(model.config, "_name_or_path", "")
    return Path(name) if name and Path(name).is_dir() else None


def _other(against: Any, resolved: Resolved) -> tuple[Model | None, str]:
    """What to compare with, opened, and its name.

    Raises:
        ArtifactNotFoundError: The artifact does not say what it was made from, or it is gone.
    """
    if against is None or against is False:
        return None, ""
    if isinstance(against, ORTModel | torch.nn.Module):
        return against, type(against).__name__
    if against is True:
        return _open_original(resolved)
    # PyTorch weights where a folder holds both: what is compared with is the original.
    other = resolve(against, task=resolved.task, hub=resolved.hub, weights=True)
    return _open_original(other) if other.artifact is None else (ORTModel.from_plan(make_plan(other)), other.name)


def _open_original(resolved: Resolved) -> tuple[ORTModel, str]:
    """The PyTorch model in float32 that a model was made from, or is, run by PyTorch; and its name.

    Raises:
        ArtifactNotFoundError: The artifact does not say what it was made from, or it is gone.
    """
    source = original(resolved)
    config = recorded_export(resolved.artifact) if resolved.artifact is not None else None
    plan = make_plan(replace(source, artifact=weights_of(source, config)))
    return ORTModel.from_plan(plan), f"{source.name} (PyTorch, float32)"
