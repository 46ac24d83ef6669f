"""`accel.tune`: try the candidates of every backend on this machine and data, and keep the best that meets the constraints."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..artifact.atomic_folder_writing import check_output, staging, tool_versions
from ..artifact.hub import HubOptions, as_folder
from ..artifact.json_writing import finite, json_text
from ..artifact.manifest import Artifact, FastestRunSettings
from ..artifact.resolved_model import ResolvedModel
from ..backends import registry
from ..backends.machine import machine, tools
from ..config import available_processors, check_number, checked_arguments
from ..errors import ConfigError
from ..measuring.accuracy.evaluation import EvaluationData
from ..measuring.latency.benchmark import pytorch_variant
from ..measuring.latency.results import VariantResult
from ..measuring.latency.workloads import WorkloadSettings, read_texts
from ..stages.export import source_digest
from ..stages.resolution import original, resolve
from .candidates import SearchSpace
from .jobs import CalibrationData
from .search import Preset, Proposal, Search
from .search_data import SearchSubject, TimeBudget, TriedCandidate, load_key
from .store import ResultStore
from .trials import Constraints, Goal, Objective, Trial, TuningResult, no_fit
from .tune_proposals import tune_proposals

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
) -> TuningResult:
    """Find the best artifact and run options for this machine, this data and these constraints, and write the artifact.

    Takes minutes: one export for each format, seconds for each recipe, about 10 s for each candidate that is timed, and
    one pass over the data for each survivor. All measurements are stored, so that a second run takes seconds.

    Args:
        model: Hub id or transformers folder.
        out: Folder to create; `from_pretrained` runs it with the measured options.
        data: Labelled rows to measure accuracy on, in any form that `accel.evaluate` accepts. All rows are used unless
            `samples` is given.
        metric: Name of the metric; `None` for the task's default.
        calibration: Rows for schemes that need activation ranges; these schemes are skipped if `None`. Use other rows than in
            `data`.
        objective: `latency` and `throughput` (rows per second, with one caller per processor) are relative to PyTorch
            float32 and averaged over the workloads; `size` is the total size of the files; `cost` is processor time per row.
        max_drop: Maximum points of the metric (percentage points of accuracy) lost compared with PyTorch float32.
        min_accuracy: Minimum value of the metric.
        max_latency_ms: Maximum median latency of every workload, in milliseconds.
        max_memory_mb: Maximum peak memory of the process, in 10^6 bytes.
        max_size_mb: Maximum total size of the files, in 10^6 bytes.
        batch: Number of rows in each call. Each batch size is measured with each sequence length. Accuracy is measured with the same
            batch sizes, and the largest drop counts.
        sequence: Number of tokens in each row.
        texts: Texts, whose lengths replace `sequence`; see `accel.benchmark`. While accuracy is measured, rows of `data` are
            then batched in their original order; without `texts`, rows of similar length share a batch.
        columns: Column names of `data` by use, for columns that cannot be inferred.
        calibration_columns: Column names of `calibration` by use; `None` for those in `columns`.
        split, calibration_split: Splits of `data` and `calibration`, for data sets on the Hub.
        samples: Maximum number of rows of `data`.
        calibration_samples: Maximum number of rows of `calibration`.
        max_length: Number of tokens after which longer rows are truncated.
        backends: Names of the backends to search. If they can run but not export a format, another backend exports it.
        device: Device type to run on; `None` for all device types that a backend finds.
        task: The task; `None` to infer it.
        threads: Threads of PyTorch, and of candidates that do not vary them; `None` for all processors that the process may use.
        time_limit_s: Time limit of the search in seconds; the search may exceed it by one or two seconds. Every stage gets a
            part of it. Candidates that were not tried are listed with that reason. `None` for no limit.
        fresh: Measure again, and ignore the results of earlier runs.
        seed: Seed of the inputs and of the random choice of rows.
        revision, token, trust_remote_code: As in transformers.

    Raises:
        BudgetError: No candidate meets the constraints. The message lists the violated constraints, and by how much the best
            candidate misses each of them.
        InputError: The data has no rows or no labels.
        ConfigError: A setting is invalid.
        ArtifactNotFoundError: The model or the data cannot be found.
    """
    if data is None:
        raise ConfigError(
            "data is None, but the search needs labelled rows to measure accuracy.", fix="pass data=... (--data FILE)."
        )
    check_number("time_limit_s", time_limit_s, above=0)
    clock = TimeBudget(limit_s=time_limit_s)
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
    store = ResultStore(fresh=fresh)
    search = Search(
        subject=_subject(resolved, device),
        data=rows,
        calibration=calibrating,
        goal=goal,
        load=WorkloadSettings(batch=tuple(batch), sequence=tuple(sequence), texts=_lines(texts, resolved.task), max_length=max_length,
                   threads=threads, seed=seed),
        store=store,
        clock=clock,
    )  # fmt: skip
    space = SearchSpace(
        task=resolved.task,
        device=device,
        backends=backends,
        half_exports=objective == "size",
        calibrated=calibration is not None,
    )
    try:
        with store.in_use():
            return search.run(_preset(search, space, target))
    except KeyboardInterrupt:
        logger.warning(
            "The search was interrupted. All measurements are saved; run the same command again to continue."
        )
        raise
    finally:
        search.close()


def _preset(search: Search, space: SearchSpace, target: Path) -> Preset[TuningResult]:
    """Generator of the proposals of `accel.tune` for `Search.run`; it returns the `TuningResult` when the winner is chosen and written.

    Raises:
        BudgetError: No candidate meets the constraints.
    """
    yield from tune_proposals(search, space)
    judge = search.judge
    finals = judge.finals()
    winner = judge.best([tried for tried in finals if search.fits(tried)])
    failed = {**{name: (None, why) for name, why in search.builder.failed.items()}, **search.failed}
    if winner is None:
        missed = [(str(t.candidate), judge.violations(t), t.accuracy is not None) for t in judge.ranked()]
        reasons = {name: why for name, (_, why) in failed.items()}
        raise no_fit(missed, asdict(search.goal.constraints), search.clock.limit_s, reasons)
    assert winner.final is not None
    trials = judge.trials(winner, failed, space)
    side_by_side = winner.final
    # Time the winner and the baseline again, without the other candidates. The table and the manifest contain these numbers.
    yield Proposal(stage="time survivors", action="alone", items=[winner])
    alone = winner.final is not side_by_side
    trials = [judge.measured_again(trial, winner) if trial.winner else trial for trial in trials]
    search.builder.files(winner.artifact)
    tuning = _tuning(search, winner, trials, side_by_side.anchor if alone else None)
    if tuning.disturbance.signs:
        logger.warning(
            "Other programs disturbed the measurements of the search: %s. End these programs, then search again with --fresh "
            "(fresh=True).",
            "; ".join(tuning.disturbance.signs),
        )
    artifact = _write(winner, tuning, target)
    search.builder.tidy({t.artifact.path for t in finals})
    return replace(tuning, artifact=artifact)


def _tuning(
    search: Search, winner: TriedCandidate, trials: Sequence[Trial], side_by_side: VariantResult | None
) -> TuningResult:
    facts = machine()
    del facts["home"], facts["executable"]
    blocks = winner.last.result.cells[0].milliseconds
    settings = {**load_key(search.load), "threads": search.load.threads or available_processors(),
                "callers": search.timer.traffic.callers, "rounds": len(blocks), "calls": len(blocks[0])}  # fmt: skip
    reference = search.grader.reference()
    return TuningResult(
        artifact=Artifact.load(winner.artifact.path),
        winner=next(trial for trial in trials if trial.winner),
        trials=tuple(trials),
        task=search.subject.task,
        metric=reference.metric,
        rows=reference.rows,
        total_rows=reference.data["total"],
        reference=reference.scored.value,
        baseline=winner.last.anchor,
        objective=search.goal.objective,
        constraints=search.goal.constraints,
        machine=facts,
        settings=settings,
        stages=search.stages,
        seconds=round(search.clock.spent(), 1),
        resumed=search.store.hits,
        batch_sizes=search.grader.batch_sizes,
        disturbance=search.judge.disturbance(winner),
        side_by_side=side_by_side,
    )


def _write(winner: TriedCandidate, tuning: TuningResult, target: Path) -> Artifact:
    """Write the winner's artifact with its run options, so that it is loaded with the measured options."""
    accuracy, result, speedup = winner.accuracy, tuning.winner.result, tuning.winner.speedup
    assert result is not None
    assert speedup is not None
    assert accuracy is not None
    run = FastestRunSettings(
        backend=winner.candidate.backend,
        device=winner.candidate.device,
        session={**result.options},
        provider_options=dict(winner.candidate.provider_options),
        measured={
            "metric": tuning.metric,
            "value": accuracy.scored.value,
            "pytorch_float32": tuning.reference,
            "drop": winner.compared.drop,
            "rows": accuracy.rows,
            "data": accuracy.data,
            "batch_size": accuracy.batch_size,
            "by_length": tuning.settings.get("texts") is None,
            "by_batch": dict(accuracy.by_batch),
            "median_ms": {c.workload: round(c.latency.median, 4) for c in result.cells},
            "pytorch_float32_ms": {c.workload: round(c.latency.median, 4) for c in tuning.baseline.cells},
            "speedup": finite(asdict(speedup)),
            "disturbed": list(tuning.disturbance.signs),
            "peak_memory_bytes": result.peak_memory_bytes,
            "objective": tuning.objective,
        },
    )
    source = tuning.artifact
    with staging(target, needs=source.bytes) as folder:
        shutil.copytree(source.path, folder, dirs_exist_ok=True)
        winning = Artifact(target, Artifact.create(folder, replace(source.manifest, run=run)).manifest)
        values = replace(tuning, artifact=winning).to_dict()
        (folder / "tune.json").write_text(json_text(values, indent=1) + "\n", encoding="utf-8")
    return winning


def _subject(model: ResolvedModel, device: str | None) -> SearchSubject:
    facts = machine()
    devices = [
        f"{spec.name}: {device} {device.name} {device.arch}"
        for spec in registry.describe_all()[0]
        for device in registry.probe(spec).devices
    ]
    machine_facts = {key: facts[key] for key in ("platform", "processors", "processors_of_machine")}
    return SearchSubject(
        model=model,
        baseline=pytorch_variant(model, device=device),
        digest=source_digest(model),
        machine={**machine_facts, "devices": sorted(devices)},
        versions=tool_versions(*tools()),
    )


def _lines(texts: Any, task: str) -> tuple[str, ...] | None:
    if texts is None:
        return None
    return tuple(read_texts(texts, task) if isinstance(texts, str | os.PathLike) else texts)
