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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..artifact.manifest import Artifact
from ..artifact.writing import check_output, staging
from ..backends import registry
from ..config import QuantizeConfig
from ..data.batches import calibration_batches, data_name, load_processor
from ..errors import BudgetError, ConfigError, QuantizeError
from ..interfaces.protocols import Feeds
from ..interfaces.task_registry import task_spec
from ..measuring.accuracy.evaluation import EvaluationData, EvaluationSet, positions
from ..measuring.disturbance import MachineWatch
from ..models.auto import close, open_model
from ..models.decoder_batches import PartBatches
from ..signatures import checked_arguments
from ..stages.quantize import quantizable
from ..stages.quantize import quantize as quantize_once
from .float_layers import BudgetSearch

logger = logging.getLogger(__name__)


@checked_arguments
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
    named = config is not None or "scheme" in settings
    recipes = [chosen]
    if not named and max_drop is not None:
        recipes = list(_recipes(artifact, chosen, backend, percentile=batches is not None and method is None))
    model = open_model(artifact)
    try:
        prepared = EvaluationSet(
            EvaluationData(
                data=data, metric=metric, columns=columns, split=split, samples=rows, seed=chosen.seed,
                batch_size=batch_size, max_length=max_length,
            ),
            task=artifact.task,
            config=model.config,
            processor=load_processor(artifact.path, artifact.task),
            limit=positions(artifact),
            folder=artifact.path,
        )  # fmt: skip
        reference = prepared.measure(model, "measuring the float artifact")
    finally:
        close(model)
    budget = math.inf if max_drop is None else max_drop
    search = BudgetSearch(artifact, prepared, reference, budget, batches, backend, watch)
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


def _nothing_fits(search: BudgetSearch, data: str) -> BudgetError:
    measured = [trial for trial in search.trials if trial.drop is not None]
    best = min(measured, key=lambda trial: trial.drop or 0.0, default=None)
    found = f"The best found is {best}." if best is not None else "No recipe could be measured."
    lines = "\n".join(f"  {trial}" for trial in search.trials)
    return BudgetError(
        f"No recipe loses at most {search.budget:g} points of {search.prepared.metric.name} on {data} at "
        f"{search.prepared.at}, where the float artifact has {search.reference.value:.4f}. {found} Tried:\n{lines}",
        fix="allow a larger max_drop, give calibration data for static schemes, or keep the float artifact.",
    )
