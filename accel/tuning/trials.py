"""Results of a search: their types, the printed table, and the error if no candidate meets the constraints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from ..artifact.json_writing import finite
from ..artifact.manifest import Artifact
from ..config import available_processors
from ..errors import BudgetError, ConfigError, did_you_mean
from ..measuring.accuracy.evaluation import rows_a_call
from ..measuring.disturbance import Disturbance
from ..measuring.latency.results import VariantResult
from ..measuring.report import disturbed, printed
from ..measuring.statistics import SpeedupEstimate

Objective = Literal["latency", "throughput", "size", "cost"]

_REASONS = 10  # maximum number of failed candidates whose reasons an error lists
_UNITS = {
    "max_drop": "points",
    "min_accuracy": "",
    "max_latency_ms": "ms",
    "max_memory_mb": "MB",
    "max_size_mb": "MB",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Constraints that the winner must meet.

    Attributes:
        max_drop: Maximum points of the metric lost compared with PyTorch float32.
        min_accuracy: Minimum value of the metric, on its own scale.
        max_latency_ms: Maximum median latency of the slowest workload, in milliseconds.
        max_memory_mb: Maximum peak memory of the process, including interpreter and PyTorch, in 10^6 bytes.
        max_size_mb: Maximum total size of the files, in 10^6 bytes.
    """

    max_drop: float | None = None
    min_accuracy: float | None = None
    max_latency_ms: float | None = None
    max_memory_mb: float | None = None
    max_size_mb: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(
                    f"{name} is {value}, but it must be a finite number of at least 0.",
                    fix="use a number of at least 0.",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The objective of a search, and the constraints that the winner must meet.

    Attributes:
        objective: Quantity that is minimised or maximised; see `accel.tune`.
        constraints: The constraints.
    """

    objective: Objective
    constraints: Constraints

    def __post_init__(self) -> None:
        words = get_args(Objective)
        if self.objective not in words:
            raise ConfigError(
                f"objective is {self.objective!r}, which is not an objective of a search.{did_you_mean(self.objective, words)}",
                fix=f"use one of {', '.join(words)}.",
            )

    @property
    def hopeless(self) -> float:
        """Factor by which a candidate's call may be slower than the baseline's before its timing is stopped.

        For throughput and cost the limit is larger by the number of processors: one thread may win although its calls are slower than
        calls with all threads. For size the limit is 100: latency does not count, but candidates that are 100 times slower are useless.
        """
        return {"latency": 3.0, "size": 100.0}.get(self.objective, 3.0 * available_processors())


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate in the result of a search.

    Attributes:
        name: Backend, recipe and run options.
        backend: Backend that runs the candidate.
        device: Device that ran the candidate.
        options: Options of the session.
        digest: Digest of the candidate's artifact.
        bytes: Total size of the artifact's files, in bytes.
        speed: The objective relative to PyTorch float32: 2 is twice as good. Equal to `speedup.value`.
        speedup: The objective relative to PyTorch float32, with its interval; see `accel.measuring.statistics.speedup`.
        result: Long measurement of the candidate; `None` if it only has a short one.
        disturbed: Signs that other programs used the machine while the candidate was measured.
        value: Metric on all rows, with the batch size that has the largest drop.
        by_batch: Metric for each batch size.
        drop: Points lost compared with PyTorch float32.
        drop_interval: Confidence interval of the drop, in points.
        agreement: Fraction of predictions that are equal to PyTorch float32's.
        front: Whether the candidate is on the Pareto front: no other candidate is at least as good in both speed and accuracy, and
            better in one of them.
        winner: Whether the candidate won.
        reason: Reason why the candidate did not win; empty for the winner.
    """

    name: str
    backend: str
    device: str
    options: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None
    bytes: int | None = None
    speed: float | None = None
    speedup: SpeedupEstimate | None = None
    result: VariantResult | None = None
    disturbed: tuple[str, ...] = ()
    value: float | None = None
    by_batch: Mapping[str, float] = field(default_factory=dict)
    drop: float | None = None
    drop_interval: tuple[float, float] | None = None
    agreement: float | None = None
    front: bool = False
    winner: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """Result of a search.

    Attributes:
        artifact: The winner's artifact, in the output folder.
        winner: Trial of the winner.
        trials: Trials of all candidates, best first.
        task: Task of the model.
        metric: Name of the metric.
        rows: Number of rows on which accuracy was measured.
        total_rows: Number of rows of the data; larger than `rows` if only a sample was measured.
        reference: Metric of PyTorch float32.
        baseline: Timing of PyTorch float32, measured next to the winner.
        objective: Quantity that was minimised or maximised.
        constraints: Constraints that the winner meets.
        machine: Facts about the machine that influence the numbers.
        settings: Workloads and threads.
        stages: Duration of each stage, in seconds.
        seconds: Duration of the search, in seconds.
        resumed: Number of measurements reused from earlier runs.
        batch_sizes: Batch sizes with which accuracy was measured. The batch size with the largest drop counts.
        disturbance: Signs that other programs used the machine while the winner was measured.
        side_by_side: Timing of PyTorch float32 in the measurement together with all candidates whose accuracy was measured.
            `baseline` and the winner's timing come from a later measurement of only these two. `None` if there was no time for the
            later measurement.
    """

    artifact: Artifact
    winner: Trial
    trials: tuple[Trial, ...]
    task: str
    metric: str
    rows: int
    total_rows: int
    reference: float
    baseline: VariantResult
    objective: Objective
    constraints: Constraints
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    stages: Mapping[str, float]
    seconds: float
    resumed: int
    batch_sizes: tuple[int, ...] = (1,)
    disturbance: Disturbance = field(default_factory=Disturbance)
    side_by_side: VariantResult | None = None

    @property
    def measured_on(self) -> str:
        """Description of the number of rows; it mentions the total if only a sample was measured."""
        return f"{self.rows} rows" if self.rows == self.total_rows else f"{self.rows} of {self.total_rows} rows"

    @property
    def front(self) -> tuple[Trial, ...]:
        """Candidates on the Pareto front, best objective first."""
        return tuple(trial for trial in self.trials if trial.front)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, in the form that `accel.measuring.report` reads."""
        measured = [(trial, trial.result) for trial in self.trials if trial.result is not None]
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["artifact"], values["batch_sizes"]
        values |= {
            "baseline": self.baseline.name,
            "variants": [
                {**asdict(self.baseline), "accuracy": self.reference},
                *({**asdict(result), "name": trial.name, "accuracy": trial.value} for trial, result in measured),
            ],
            "rejected": [{"name": trial.name, "reason": trial.reason} for trial in self.trials if not trial.winner],
            "trials": [asdict(replace(trial, result=None)) for trial in self.trials],
            "path": str(self.artifact.path),
            "winner": self.winner.name,
            "constraints": asdict(self.constraints),
            "accuracy": {"batch_size": list(self.batch_sizes), "by_length": self.settings.get("texts") is None},
            "disturbance": asdict(self.disturbance),
            "side_by_side": asdict(self.side_by_side) if self.side_by_side is not None else None,
        }
        plain: dict[str, Any] = finite(values)
        return plain


def no_fit(
    missed: Sequence[tuple[str, Mapping[str, float], bool]],
    limits: Mapping[str, float | None],
    limit_s: float | None,
    failed: Mapping[str, str],
) -> BudgetError:
    """Return the error for a search without a winner. Its message lists the violated constraints, and by how much the closest
    candidate misses each of them.

    Args:
        missed: For each candidate: its name, by how much it misses each constraint, and whether its accuracy was measured.
        limits: The constraints.
        limit_s: The time limit in seconds; `None` for no limit.
        failed: Reasons why the other candidates were not timed, by name.
    """
    if not any(by or measured for _, by, measured in missed):
        within = f" within {limit_s:g} s" if limit_s is not None else ""
        fix = "run `accel tune --verbose` to see all errors."
        why = "".join(f"\n  {name}: {reason}" for name, reason in list(failed.items())[:_REASONS])
        more = f"\n  and {len(failed) - _REASONS} more" if len(failed) > _REASONS else ""
        return BudgetError(
            f"The search could not measure the accuracy of any candidate{within}. It timed {len(missed)} candidates.{why}{more}",
            fix=fix if limit_s is None else f"use a longer time limit (--time-limit), or {fix}",
        )
    lines = []
    for name, limit in limits.items():
        if limit is None:
            continue
        needs_accuracy = name in ("max_drop", "min_accuracy")
        judged = [(who, by) for who, by, measured in missed if measured or not needs_accuracy]
        alone = sum(set(by) == {name} for _, by in judged)
        who, by = min(((who, by.get(name, 0.0)) for who, by in judged), key=lambda item: item[1], default=("", 0.0))
        if not judged:
            lines.append(f"  {name} {limit:g}: not checked, because every candidate violates another constraint")
        elif by > 0:
            unit = f" {_UNITS[name]}".rstrip()
            lines.append(
                f"  {name} {limit:g}: violated by all candidates; the closest misses it by {by:.4g}{unit} ({who})"
            )
        elif alone:
            lines.append(f"  {name} {limit:g}: the only violated constraint of {alone} candidates")
        else:
            lines.append(f"  {name} {limit:g}: satisfied by {sum(name not in by for _, by in judged)} candidates")
    return BudgetError(
        f"None of the {len(missed)} measured candidates satisfies all constraints:\n" + "\n".join(lines),
        fix="relax a violated constraint, or pass calibration data, so that the search can also try static quantization.",
    )


def render(tuning: TuningResult) -> str:
    """Return the Pareto front, the winner and the rejected candidates as text for a terminal."""
    from rich.table import Table

    names = [cell.workload for cell in tuning.baseline.cells]
    rows = f"{tuning.measured_on}, {rows_a_call(tuning.batch_sizes)}"
    table = Table(title=f"Pareto front: {tuning.objective} against {tuning.metric} on {rows}")
    table.add_column("candidate")
    for head in (*(f"{name} ms" for name in names), "x PyTorch (95 %)", tuning.metric, "drop (95 % interval)", "MB"):
        table.add_column(head, justify="right")
    base = tuning.baseline
    size = f"{base.bytes / 1e6:.1f}" if base.bytes else ""
    row = [f"{cell.latency.median:.2f}" for cell in base.cells]
    table.add_row(base.name, *row, "1.00", f"{tuning.reference:.4f}", "", size)
    for trial in tuning.trials:
        if not trial.front or trial.result is None or trial.value is None or trial.drop is None:
            continue
        low, high = trial.drop_interval or (math.nan, math.nan)
        table.add_row(
            f"{'* ' if trial.winner else ''}{trial.name}",
            *(f"{cell.latency.median:.2f}" for cell in trial.result.cells),
            str(trial.speedup),
            f"{trial.value:.4f}",
            f"{trial.drop:.2f} ({low:.2f} to {high:.2f})",
            f"{(trial.bytes or 0) / 1e6:.1f}",
        )
    rejected = "\n".join(f"  {trial.name}: {trial.reason}" for trial in tuning.trials if not trial.winner)
    notes = "".join(f"{line}\n" for line in _notes(tuning))
    return (
        f"{printed(table, 150)}{notes}Rejected:\n{rejected}\n"
        f"Kept: {tuning.winner.name}, in {tuning.artifact.path} ({tuning.seconds:.0f} s, "
        f"{tuning.resumed} results from earlier runs)."
    )


def _notes(tuning: TuningResult) -> list[str]:
    """Return notes about how the numbers of the table were measured."""
    notes = []
    if tuning.side_by_side is not None:
        notes.append(
            f"The winner (*) and {tuning.baseline.name} were timed again in a last measurement of only these two. The other "
            "candidates were timed together, where calls take a little longer."
        )
    return [*notes, *disturbed({"disturbance": asdict(tuning.disturbance)})]
