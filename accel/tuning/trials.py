"""Results of a search: their types, the table, and the error when nothing fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from ..artifact.manifest import Artifact
from ..errors import BudgetError, ConfigError, did_you_mean
from ..measuring.accuracy.evaluation import rows_a_call
from ..measuring.disturbance import Disturbance
from ..measuring.latency.results import VariantResult, without_infinity
from ..measuring.report import disturbed
from ..measuring.statistics import Ratio

Objective = Literal["latency", "throughput", "size", "cost"]

_REASONS = 10  # of candidates that failed, in an error
_UNITS = {
    "max_drop": "points",
    "min_accuracy": "",
    "max_latency_ms": "ms",
    "max_memory_mb": "MB",
    "max_size_mb": "MB",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a winner must satisfy.

    Attributes:
        max_drop: Points of the metric lost against PyTorch float32.
        min_accuracy: Least value of the metric, on its own scale.
        max_latency_ms: Median of the slowest workload.
        max_memory_mb: Peak memory of the process, interpreter and PyTorch included, in 10^6 bytes.
        max_size_mb: Files, in 10^6 bytes.
    """

    max_drop: float | None = None
    min_accuracy: float | None = None
    max_latency_ms: float | None = None
    max_memory_mb: float | None = None
    max_size_mb: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name} is {value}.", fix="give a number from 0 on.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is best, and what a winner must satisfy.

    Attributes:
        objective: What is minimised or maximised; see `accel.tune`.
        constraints: What holds in any case.
    """

    objective: Objective
    constraints: Constraints

    def __post_init__(self) -> None:
        words = get_args(Objective)
        if self.objective not in words:
            raise ConfigError(
                f"objective is {self.objective!r}.{did_you_mean(self.objective, words)}", fix=f"use {', '.join(words)}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate.

    Attributes:
        name: Backend, recipe and run options.
        backend: Who runs it.
        device: The device that ran it.
        options: The session's options.
        digest: Of its artifact.
        bytes: Of its files.
        speed: The objective relative to PyTorch float32: 2 is twice as good. The same as `speedup.value`.
        speedup: The same with its interval; see `accel.measuring.statistics.speedup`.
        result: Its last measurement; `None` where it was only screened.
        disturbed: What says that other programs used the machine while it was measured.
        value: Its metric on all rows, with the rows a call that lose most.
        by_batch: Its metric by rows a call.
        drop: Points lost against PyTorch float32.
        drop_interval: Confidence interval of the drop, in points.
        agreement: Share of predictions that are PyTorch float32's.
        front: Whether nothing measured is both faster and at least as accurate.
        winner: Whether it was kept.
        reason: Why it was not.
    """

    name: str
    backend: str
    device: str
    options: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None
    bytes: int | None = None
    speed: float | None = None
    speedup: Ratio | None = None
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
class Tuning:
    """Result of a search.

    Attributes:
        artifact: The winner, in its folder.
        winner: Its trial.
        trials: Every candidate, best first.
        task: Of the model.
        metric: What was measured.
        rows: On how many rows.
        total_rows: How many rows the data has; more than `rows` where a sample was asked for.
        reference: PyTorch float32's value.
        baseline: PyTorch float32, timed beside the survivors.
        objective: What was minimised or maximised.
        constraints: What the winner satisfies.
        machine: Facts that the numbers depend on.
        settings: Workloads and threads.
        stages: Seconds by stage.
        seconds: For everything.
        resumed: Measurements that earlier runs had made.
        batch_sizes: Rows a call that accuracy was measured with; of several the worst counts.
        disturbance: Whether other programs used the machine while the winner was measured.
        side_by_side: PyTorch float32 as it was timed beside all survivors; the winner's own row, and `baseline`, are of a
            measurement of these two alone, unless time was short.
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
        """Describe the rows; a sample is always called one."""
        return f"{self.rows} rows" if self.rows == self.total_rows else f"{self.rows} of {self.total_rows} rows"

    @property
    def front(self) -> tuple[Trial, ...]:
        """The Pareto front, best objective first."""
        return tuple(trial for trial in self.trials if trial.front)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, in the form that `accel.measuring.report` reads."""
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
        plain: dict[str, Any] = without_infinity(values)
        return plain


def no_fit(
    missed: Sequence[tuple[str, Mapping[str, float], bool]],
    limits: Mapping[str, float | None],
    limit_s: float | None,
    failed: Mapping[str, str],
) -> BudgetError:
    """Return the error when no candidate satisfies all constraints: which ones bind, and by how much.

    Args:
        missed: Of each candidate its name, by how much it misses each constraint, and whether its accuracy was measured.
        limits: The constraints.
        limit_s: The time limit.
        failed: Why the others were not timed, by name.
    """
    if not any(by or known for _, by, known in missed):
        within = f" within {limit_s:g} s" if limit_s is not None else ""
        fix = "run `accel tune --verbose` to see why."
        why = "".join(f"\n  {name}: {reason}" for name, reason in list(failed.items())[:_REASONS])
        more = f"\n  and {len(failed) - _REASONS} more" if len(failed) > _REASONS else ""
        return BudgetError(
            f"The accuracy of no candidate could be measured{within}; {len(missed)} were timed.{why}{more}",
            fix=fix if limit_s is None else f"allow more time (--time-limit), or {fix}",
        )
    lines = []
    for name, limit in limits.items():
        if limit is None:
            continue
        needs_accuracy = name in ("max_drop", "min_accuracy")
        about = [(who, by.get(name, 0.0)) for who, by, known in missed if known or not needs_accuracy]
        if not about:
            lines.append(f"  {name} {limit:g}: not reached, because every candidate fails another constraint")
            continue
        who, by = min(about, key=lambda item: item[1])
        alone = sum(set(other) == {name} for _, other, known in missed if known or not needs_accuracy)
        if by > 0:
            unit = f" {_UNITS[name]}".rstrip()
            lines.append(f"  {name} {limit:g} binds: the closest candidate misses it by {by:.4g}{unit} ({who})")
        elif alone:
            lines.append(f"  {name} {limit:g} binds together with others: {alone} candidates miss only this one")
        else:
            lines.append(f"  {name} {limit:g}: satisfied by {sum(b <= 0 for _, b in about)} candidates")
    return BudgetError(
        f"No candidate satisfies all constraints; {len(missed)} were measured.\n" + "\n".join(lines),
        fix="relax the constraint that binds, or give calibration data so that more recipes can be tried.",
    )


def render(tuning: Tuning) -> str:
    """The Pareto front, the winner and the rest, for a terminal."""
    from io import StringIO

    from rich.console import Console
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
    stream = StringIO()
    Console(file=stream, width=150, markup=False).print(table)
    rejected = "\n".join(f"  {trial.name}: {trial.reason}" for trial in tuning.trials if not trial.winner)
    told = "".join(f"{line}\n" for line in _notes(tuning))
    return (
        f"{stream.getvalue()}{told}Rejected:\n{rejected}\n"
        f"Kept: {tuning.winner.name}, in {tuning.artifact.path} ({tuning.seconds:.0f} s, "
        f"{tuning.resumed} results from earlier runs)."
    )


def _notes(tuning: Tuning) -> list[str]:
    """Describe how the numbers of the table were measured."""
    notes = []
    if tuning.side_by_side is not None:
        notes.append(
            f"* and {tuning.baseline.name} are shown as they were timed last, these two alone, which is how the winner will run. The "
            "others were timed side by side, where calls take a little longer."
        )
    return [*notes, *disturbed({"disturbance": asdict(tuning.disturbance)})]
