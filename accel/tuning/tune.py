"""`accel.tune`: try the candidates of every backend on this machine and data, and keep the best that fits."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..artifact.hub import HubOptions, as_folder
from ..artifact.resolved_model import Resolved
from ..artifact.writing import check_output, tool_versions
from ..backends import registry
from ..backends.machine import machine, tools
from ..config import check_number, checked_arguments
from ..errors import ConfigError
from ..measuring.accuracy.evaluation import EvaluationData
from ..measuring.latency.benchmark import pytorch_variant
from ..measuring.latency.workloads import Load, read_texts
from ..stages.export import source_digest
from ..stages.resolution import original, resolve
from .candidates import Space
from .jobs import CalibrationData
from .search import Search
from .store import Store
from .subject import Clock, Subject
from .trials import Constraints, Goal, Objective, Tuning

logger = logging.getLogger(__name__)


@checked_arguments(model=(str, os.PathLike), device=str)
def tune(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    data: Any,
    metric: str | None = None,
    calibration: Any = None,
    objective: Objective = "latency",
    max_drop: float | None = None,
    min_accuracy: float | None = None,
    max_latency_ms: float | None = None,
    max_memory_mb: float | None = None,
    max_size_mb: float | None = None,
    batch: Sequence[int] = (1,),
    sequence: Sequence[int] = (128,),
    texts: str | os.PathLike[str] | Sequence[str] | None = None,
    columns: Mapping[str, str] | None = None,
    calibration_columns: Mapping[str, str] | None = None,
    split: str | None = None,
    calibration_split: str | None = None,
    samples: int | None = None,
    calibration_samples: int = 256,
    max_length: int | None = None,
    backends: Sequence[str] | None = None,
    device: str | None = None,
    task: str | None = None,
    threads: int | None = None,
    time_limit_s: float | None = None,
    fresh: bool = False,
    seed: int = 0,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
) -> Tuning:
    """Find the best artifact and run options for this machine, this data and these constraints, and write the artifact.

    Takes minutes: one export for each format, seconds for each recipe, about 10 s for each candidate that is timed, and
    one pass over the data for each survivor. What was measured is kept, so that a second run takes seconds.

    Args:
        model: Hub id or transformers folder.
        out: Folder to make; `from_pretrained` runs it as it was measured.
        data: Labelled rows to measure accuracy on, all of them unless `samples` says otherwise; as for `accel.evaluate`.
        metric: What is measured; the task's default when `None`.
        calibration: Rows for schemes that need activation ranges; these are skipped when `None`. Not the rows of `data`.
        objective: `latency` and `throughput` (rows a second, a caller for each processor) are relative to PyTorch
            float32, averaged over the workloads; `size` is that of the files; `cost` is processor time a row.
        max_drop: Points of the metric (percentage points of accuracy) that may be lost against PyTorch float32.
        min_accuracy: Least value of the metric.
        max_latency_ms: Largest median, on every workload.
        max_memory_mb: Largest peak memory of the serving process.
        max_size_mb: Largest size of the files.
        batch: Rows a call; each with each sequence. Accuracy is measured with as many rows a call, too; of several numbers the
            one that loses most counts.
        sequence: Tokens a row.
        texts: Real texts instead of `sequence`; see `accel.benchmark`. Rows of `data` then share a call in their order, and
            otherwise those of like length.
        columns: Column by use of `data`, where it cannot be inferred.
        calibration_columns: Likewise of `calibration`; `columns` when `None`.
        split, calibration_split: Of a Hub data set.
        samples: Rows of `data` at most.
        calibration_samples: Rows of `calibration` at most.
        max_length: Tokens that longer rows are cut to.
        backends: Limits the search to these. What they run and none of them exports, another one exports.
        device: Device type to run on; every one that a backend finds when `None`.
        task: The task; inferred when `None`.
        threads: Threads of PyTorch and of candidates that do not vary them; what the process may use when `None`.
        time_limit_s: Seconds for the search, within one or two. Every stage has its share; what is not tried is listed
            with that reason. `None`: no limit.
        fresh: Measure again what earlier runs measured.
        seed: Of inputs and of the choice of rows.
        revision, token, trust_remote_code: As in transformers.

    Raises:
        BudgetError: No candidate fits; says which constraint binds and by how much.
        InputError: Data without rows or labels.
        ConfigError: Settings that cannot work.
        ArtifactNotFoundError: The model or the data is not to be found.
    """
    if data is None:
        raise ConfigError("A search needs labelled data to measure accuracy on.", fix="pass data=... (--data FILE).")
    check_number("time_limit_s", time_limit_s, above=0)
    clock = Clock(limit_s=time_limit_s)
    goal = Goal(
        objective=objective,
        constraints=Constraints(
            max_drop=max_drop, min_accuracy=min_accuracy, max_latency_ms=max_latency_ms, max_memory_mb=max_memory_mb,
            max_size_mb=max_size_mb,
        ),
    )  # fmt: skip
    hub = HubOptions(revision=revision, token=token, trust_remote_code=trust_remote_code)
    target = check_output(out, as_folder(model))
    resolved = original(resolve(model, task=task, hub=hub, weights=True))
    rows = EvaluationData(
        data=data, metric=metric, columns=columns, split=split, token=token, samples=samples, seed=seed,
        by_length=texts is None, max_length=max_length, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    calibrating = None
    if calibration is not None:
        calibrating = CalibrationData(
            data=calibration, columns=calibration_columns or columns, split=calibration_split, max_length=max_length,
            samples=calibration_samples,
        )  # fmt: skip
    store = Store(fresh=fresh)
    search = Search(
        subject=_subject(resolved, device),
        data=rows,
        calibration=calibrating,
        goal=goal,
        load=Load(batch=tuple(batch), sequence=tuple(sequence), texts=_lines(texts, resolved.task), max_length=max_length,
                   threads=threads, seed=seed),
        store=store,
        clock=clock,
    )  # fmt: skip
    space = Space(
        task=resolved.task,
        device=device,
        backends=backends,
        half_exports=objective == "size",
        calibrated=calibration is not None,
    )
    try:
        with store.in_use():
            return search.run(space, target)
    except KeyboardInterrupt:
        logger.warning("Interrupted; what was measured is kept: the same call goes on from there.")
        raise
    finally:
        search.close()


def _subject(model: Resolved, device: str | None) -> Subject:
    facts = machine()
    devices = [
        f"{spec.name}: {device} {device.name} {device.arch}"
        for spec in registry.describe_all()[0]
        for device in registry.probe(spec).devices
    ]
    here = {key: facts[key] for key in ("platform", "processors", "processors_of_machine")}
    return Subject(
        model=model,
        baseline=pytorch_variant(model, device=device),
        digest=source_digest(model),
        machine={**here, "devices": sorted(devices)},
        versions=tool_versions(*tools()),
    )


def _lines(texts: Any, task: str) -> tuple[str, ...] | None:
    if texts is None:
        return None
    return tuple(read_texts(texts, task) if isinstance(texts, str | os.PathLike) else texts)
