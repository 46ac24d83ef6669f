"""`accel.evaluate`: measure a model on labelled data, and compare it with its PyTorch original on the same rows."""

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
from ...artifact.resolved_model import ResolvedModel
from ...backends.plan import RunPreferences, make_plan
from ...config import SessionOptions, check_number, checked_arguments
from ...data.batches import BATCH_SIZE, load_processor
from ...data.columns import map_columns
from ...data.rows import DatasetRows, load_rows, take
from ...errors import ConfigError, InputError, PluginError
from ...interfaces.task_registry import task_spec
from ...models.base import ORTModel
from ...stages.foreign_folders import weights_of
from ...stages.resolution import original, recorded_export, resolve
from .comparison import Comparison, ScoredRows, compare
from .metrics import Metric
from .predictors import Model, Predictor, metric_for, predictor_for

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The result of `accel.evaluate`.

    Attributes:
        metric: Name of the metric.
        value: Value of the metric, on the scale of the `evaluate` library.
        scores: All scores that the metric returns, by name.
        task: Task of the model.
        rows: Number of rows that were evaluated.
        data: The sample of rows; see `accel.data.rows.SampledRowsRecord`.
        backend: Backend that ran the model; `pytorch` for a PyTorch model.
        compute_dtype: Data type used for computation.
        batch_size: Number of rows in each call. The metric depends on it, because dynamic quantization computes ranges for each call.
        max_length: Number of tokens after which longer rows were truncated.
        seconds: Time to run the model over all rows, in seconds.
        comparison: Comparison with the other model; `None` if none was requested.
        predictions: One prediction for each row: a class, tags, an answer, a number or a `metrics.LanguageModelPrediction`.
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
        """Return the evaluation as JSON values, without the predictions."""
        values = asdict(replace(self, predictions=()))
        del values["predictions"]
        if values["comparison"] is not None:
            # Remove the two fields that repeat `value` and `rows` of the evaluation.
            del values["comparison"]["own"], values["comparison"]["rows"]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """The rows to evaluate, and how they are batched.

    Attributes:
        data: The rows, in any form that `accel.data.rows.load_rows` accepts.
        metric: Name of the metric; `None` for the default metric of the models' predictions.
        columns: Column names by use, for columns that cannot be inferred.
        split, revision, token: Split, revision and access token of a data set on the Hub.
        samples: Maximum number of rows.
        seed: Seed of the random choice of rows.
        batch_size: Number of rows in each call.
        by_length: If true, rows of similar length share a call, as in the server. If false, rows are batched in their original
            order. Each batch is padded to its longest row.
        max_length: Number of tokens after which longer rows are truncated.
        trust_remote_code: Allow code from the Hub: metric scripts, and the model's tokenizer or processor.
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
    """Rows, references and a metric, prepared once to evaluate any number of models of one task.

    Attributes:
        task: Task of the models.
        metric: The metric.
        rows: The rows, with mapped columns.
        predictor: The predictor, which contains the rows as model inputs and computes predictions.
    """

    def __init__(
        self,
        settings: EvaluationData,
        model: Model,
        *,
        task: str,
        processor: Any = None,
    ) -> None:
        """Load and tokenize the rows, map their columns, and read their labels.

        Args:
            settings: The rows, and how they are batched.
            model: One of the models. Its config has the labels; files in its folder define how texts are tokenized and how outputs
                are compared.
            task: Task of the models.
            processor: Tokenizer or image processor of the models; `None` for the one in the model's folder.

        Raises:
            ConfigError: The model is a PyTorch model without a folder, and no processor was passed.
        """
        config, folder, limit = model.config, _folder(model), None
        if isinstance(model, ORTModel):
            sizes = model.artifact.components[0].max_sizes
            limit = sizes.get("sequence", sizes.get("total"))
        check_number("batch_size", settings.batch_size, 1)
        self.task = task_spec(task).name
        if processor is None and folder is None:
            raise ConfigError(
                f"The PyTorch model {type(model).__name__} was not loaded from a folder, so accel cannot find its tokenizer or processor.",
                fix="pass the tokenizer or processor as processor=..., or pass the model as a Hub id or folder.",
            )
        if processor is None and folder is not None:
            processor = load_processor(folder, self.task, trust_remote_code=settings.trust_remote_code)
        kind = predictor_for(self.task, config)
        # Check the metric before the rows are loaded, so that a wrong metric name raises before a data set is downloaded.
        self.metric: Metric = metric_for(
            settings.metric,
            kind,
            classes=int(getattr(config, "num_labels", 2)),
            trust_remote_code=settings.trust_remote_code,
        )
        loaded = load_rows(settings.data, split=settings.split, revision=settings.revision, token=settings.token)
        self.rows: DatasetRows = take(map_columns(loaded, self.task, settings.columns), settings.samples, settings.seed)
        self.predictor: Predictor = kind(
            self.rows,
            task=self.task,
            config=config,
            processor=processor,
            max_length=settings.max_length,
            limit=limit,
            batch_size=settings.batch_size,
            folder=folder,
            by_length=settings.by_length,
        )

    @property
    def at(self) -> str:
        """The number of rows in each call, as text for messages, such as `32 rows a call`."""
        return rows_a_call([self.predictor.batch_size])

    def measure(self, model: Model, description: str = "evaluating") -> ScoredRows:
        """Run a model over all rows and compute the metric.

        Raises:
            InputError: The metric is not a finite number: all predictions are the same, or some are not finite.
            PluginError: The metric does not return the score that its `key` names.
        """
        started = time.perf_counter()
        predictions = self.predictor.predict(model, description)
        seconds = time.perf_counter() - started
        scores = dict(self.metric.compute(predictions, self.predictor.references))
        if self.metric.key not in scores:
            raise PluginError(
                f"The metric {self.metric.name!r} returned the scores {sorted(scores)}, but Metric.key is {self.metric.key!r}, which is "
                "not one of them.",
                fix="in the plugin that defines the metric, set Metric.key to one of the scores that Metric.compute returns.",
            )
        value = scores[self.metric.key]
        if not math.isfinite(value):
            raise InputError(
                f"The metric {self.metric.name!r} is {value} on {len(self.rows)} rows. Either all predictions or all references are equal, "
                "or some predictions are not finite numbers.",
                fix="measure more rows, or use another metric.",
            )
        return ScoredRows(value=value, scores=scores, predictions=tuple(predictions), seconds=seconds)

    def compare(self, scored: ScoredRows, other: ScoredRows, name: str, confidence: float = 0.95) -> Comparison:
        """Compare the scores of a model with the scores `other` of the model called `name`; both were measured on the same rows."""
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
) -> EvaluationResult:
    """Measure a model on labelled data and, if requested, compare it with another model on the same rows.

    Rows of similar length share a batch. MiniLM on the 3,080 queries of BANKING77 takes a few seconds on two cores.

    Args:
        model: An artifact, a folder or Hub id (exported if necessary), a loaded accel model or a PyTorch model.
        data: A `datasets.Dataset`, a list of dictionaries, a CSV, JSON or Parquet file, or the name of a data set on the
            Hub.
        metric: `accuracy`, `f1`, `precision`, `recall`, `matthews_correlation`, `seqeval`, `squad`, `exact_match`,
            `spearmanr`, `pearsonr`, `mse`, `perplexity` and the metrics of images (`map`, `mean_iou`, `abs_rel`, `psnr`, ...)
            work offline; other names are loaded by the `evaluate` library. `None` for the task's default metric.
        against: The model to compare with. `True` for the PyTorch model from which the artifact was made.
        task: Task of a PyTorch model whose task cannot be inferred from its class.
        columns: Column names by use (`{"text": "query", "label": "intent"}`), for columns that cannot be inferred.
        split: Split of the data.
        data_revision: Revision of a data set on the Hub.
        samples: Maximum number of rows; `None` for all rows.
        seed: Seed of the random choice of rows.
        batch_size: Number of rows in each call. `None` for the batch size of the accuracy that is recorded in the artifact's manifest; if
            none is recorded, 1 for a dynamically quantized artifact, whose outputs depend on the other rows of the call, and
            32 for any other model.
        max_length: Number of tokens after which longer rows are truncated; `None` for the model's limit. For text
            generation, the number of tokens of the windows into which rows are split; `None` for 512.
        processor: Tokenizer or image processor; `None` for the one of the model.
        confidence: Confidence level of the interval of the difference.
        backend, device, session_options: How the model is run; see `from_pretrained`.
        revision, token, trust_remote_code: As in transformers.

    Raises:
        InputError: The data has no rows or no labels, its columns do not map, or a label is not in the model's config.
        ConfigError: The metric, the split or a column does not exist, or an argument is invalid.
        ArtifactNotFoundError: The model, its original or the data cannot be found.
    """
    if not 0 < confidence < 1:
        raise ConfigError(
            f"confidence is {confidence}, but it must be between 0 and 1.", fix="pass confidence=0.95, for example."
        )
    hub = HubOptions(revision=revision, token=token, trust_remote_code=trust_remote_code)
    run = RunPreferences(backend=backend, device=device, options=session_options)
    resolved = resolve(model, task=task, hub=hub)
    opened: Model = (
        _at_hand(model, run)
        if isinstance(model, ORTModel | torch.nn.Module)
        else ORTModel.from_plan(make_plan(resolved, run))
    )
    try:
        usual, by_length = _usual_calls(opened.artifact) if isinstance(opened, ORTModel) else (BATCH_SIZE, True)
        settings = EvaluationData(
            data=data, metric=metric, columns=columns, split=split, revision=data_revision, token=token, samples=samples,
            seed=seed, batch_size=usual if batch_size is None else batch_size, by_length=by_length, max_length=max_length,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        prepared = EvaluationSet(settings, opened, task=resolved.task, processor=processor)
        other, name = _other(against, resolved)
        scored = prepared.measure(opened)
        comparison = None
        if other is not None:
            comparison = prepared.compare(scored, prepared.measure(other, f"evaluating {name}"), name, confidence)
            if other is not against and isinstance(other, ORTModel):
                other.close()
        logger.info("%s %.4f on %d rows", prepared.metric.name, scored.value, len(prepared.rows))
        return EvaluationResult(
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
    """Return text for messages: the numbers of rows in each call while accuracy is measured."""
    sizes = " and ".join(str(size) for size in batch_sizes)
    return f"{sizes} {'row' if list(batch_sizes) == [1] else 'rows'} a call"


def _usual_calls(artifact: Artifact) -> tuple[int, bool]:
    """Return rows per call, and whether rows are batched by length, from the accuracy recorded in the artifact's manifest."""
    manifest = artifact.manifest
    measured = [manifest.run.measured] if manifest.run is not None else []
    measured += [step.validation["accuracy"] for step in reversed(manifest.steps) if "accuracy" in step.validation]
    for record in measured:
        if "batch_size" in record:
            return int(record["batch_size"]), bool(record.get("by_length", True))
    dynamic = manifest.quantization is not None and manifest.quantization.scheme.startswith("dynamic")
    return 1 if dynamic else BATCH_SIZE, True


def _at_hand(model: Model, run: RunPreferences) -> Model:
    """Return a model that the caller has already loaded, in evaluation mode.

    Raises:
        ConfigError: The caller passed settings that can only be applied while a model is loaded.
    """
    if run != RunPreferences():
        raise ConfigError(
            "The model is already loaded, so the arguments backend, device and session_options of accel.evaluate have no effect.",
            fix="pass backend, device and session_options to from_pretrained when you load the model, or pass the model as a Hub id or "
            "folder.",
        )
    return model.eval()


def _compute_dtype(model: Model) -> str:
    if isinstance(model, ORTModel):
        return model.compute_dtype
    return str(next((p.dtype for p in model.parameters() if p.is_floating_point()), "float32")).removeprefix("torch.")


def _folder(model: Model) -> Path | None:
    """Return the folder with a model's files: the artifact's folder, or the folder that a PyTorch model was loaded from."""
    if isinstance(model, ORTModel):
        return model.artifact.path
    name = getattr(model.config, "_name_or_path", "")
    return Path(name) if name and Path(name).is_dir() else None


def _other(against: Any, resolved: ResolvedModel) -> tuple[Model | None, str]:
    """Load the model to compare with; return the model and its name."""
    if against is None or against is False:
        return None, ""
    if isinstance(against, ORTModel | torch.nn.Module):
        return against, type(against).__name__
    if against is True:
        return _open_original(resolved)
    # A folder may contain both a graph and weights: compare with the weights.
    other = resolve(against, task=resolved.task, hub=resolved.hub, weights=True)
    return _open_original(other) if other.artifact is None else (ORTModel.from_plan(make_plan(other)), other.name)


def _open_original(resolved: ResolvedModel) -> tuple[ORTModel, str]:
    """Load the float32 PyTorch model from which a model was made; return the PyTorch model and its name.

    Raises:
        ArtifactNotFoundError: The artifact's manifest does not contain the source model, or the source model no longer exists.
    """
    source = original(resolved)
    config = recorded_export(resolved.artifact) if resolved.artifact is not None else None
    plan = make_plan(replace(source, artifact=weights_of(source, config)))
    return ORTModel.from_plan(plan), f"{source.name} (PyTorch, float32)"
