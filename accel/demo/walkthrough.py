"""Run the demo: export, optimize and quantize with every backend, measure accuracy and latency next to PyTorch, and run a search."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ..artifact.atomic_folder_writing import check_output
from ..artifact.manifest import Artifact
from ..backends import registry
from ..backends.plan import RunPreferences, make_plan
from ..backends.stage_backend_selection import plan_stage
from ..config import SessionOptions, available_processors
from ..errors import ConfigError
from ..interfaces.specs import WEIGHTS, BackendSpec
from ..measuring.accuracy.evaluation import EvaluationResult, evaluate
from ..measuring.disturbance import MachineWatch
from ..measuring.latency.benchmark import BenchmarkEffort, measure_variants
from ..measuring.latency.variants import Traffic, Variant
from ..measuring.latency.workloads import WorkloadSettings
from ..measuring.report import printed
from ..measuring.statistics import SpeedupEstimate
from ..models.base import ORTModel
from ..stages.export import export
from ..stages.foreign_folders import weights_of
from ..stages.optimize import optimize
from ..stages.resolution import resolve
from ..tuning.quantize_within_budget import quantize
from ..tuning.tune import tune
from . import CALIBRATION_SET, MODEL, TEST_SET

_SHAPE = (1, 16)
_LOAD = WorkloadSettings(batch=_SHAPE[:1], sequence=_SHAPE[1:])
_EFFORT = BenchmarkEffort(rounds=8, calls=25, processes=1)
_MAX_DROP = 0.3
_SEARCH_S = 300.0
_TASK = "text-classification"
_PYTORCH = "PyTorch eager, float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResultRow:
    """One row of the table.

    Attributes:
        name: Name of the variant.
        accuracy: Accuracy on the whole test set, with one query per call, as in the latency measurement.
        agreement: Fraction of predictions that are equal to PyTorch's.
        median_ms, p5_ms, p95_ms: Median and percentiles of the latencies of all calls, in milliseconds.
        speedup: Speed-up over PyTorch; see `accel.measuring.statistics.speedup`.
        speedup_low, speedup_high: Ends of its 95 % interval.
        megabytes: Total size of weights and graphs, in 10^6 bytes.
        compute_dtype: Data type used for computation.
    """

    name: str
    accuracy: float
    agreement: float
    median_ms: float
    p5_ms: float
    p95_ms: float
    speedup: float
    speedup_low: float
    speedup_high: float
    megabytes: float
    compute_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSearch:
    """Result of `accel tune` for the demo's model and data.

    Attributes:
        winner: Name of the winner.
        speed: Speed-up over PyTorch float32.
        speed_low, speed_high: Ends of its 95 % interval.
        drop: Points of accuracy lost on the whole test set.
        max_drop: Maximum points of accuracy that could be lost.
        candidates: Number of candidates that were tried or rejected.
        seconds: Duration of the search, in seconds.
    """

    winner: str
    speed: float
    speed_low: float
    speed_high: float
    drop: float
    max_drop: float
    candidates: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Result of the demo.

    Attributes:
        rows: One row for each variant; PyTorch first.
        max_abs_difference: Largest difference of the exported graphs from PyTorch.
        queries: Number of rows of the test set, all of which are evaluated.
        shape: Batch size and sequence length of the latency measurement.
        threads: Number of threads of each variant.
        seconds: Duration of the demo, in seconds.
        absent: Names of rows that cannot be measured on this machine or in this environment, with the reason.
        tuned: Result of the search; `None` without a search.
        disturbed: Signs that other programs used the machine during the measurement.
    """

    rows: tuple[DemoResultRow, ...]
    max_abs_difference: float
    queries: int
    shape: tuple[int, int]
    threads: int
    seconds: float
    absent: Mapping[str, str] = field(default_factory=dict)
    tuned: DemoSearch | None = None
    disturbed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """An artifact and the way to run it."""

    name: str
    artifact: Artifact
    backend: str
    options: SessionOptions = field(default_factory=SessionOptions)

    @property
    def variant(self) -> Variant:
        """The variant to time."""
        return Variant(name=self.name, path=self.artifact.path, task=_TASK, backend=self.backend, options=self.options)

    def evaluate(self) -> EvaluationResult:
        """Measure accuracy on the whole test set, with one query per call, as in the latency measurement."""
        return evaluate(
            self.artifact, TEST_SET, batch_size=_SHAPE[0], backend=self.backend, session_options=self.options
        )


def run(out: Path | None = None) -> DemoReport:
    """Run the demo, and return its results.

    Export the demo model, optimize and quantize it, evaluate every artifact on the whole test set, time the artifacts next to PyTorch, and
    let `accel.tune` search for the fastest one.

    Args:
        out: Folder for the first float artifact. The other artifacts are written next to it; the backend and the step (`-o2`,
            `-int8`, `-tuned`) are appended to the name. `None` for a temporary folder.
    """
    started = time.perf_counter()
    watch = MachineWatch()
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "artifact"
        exporters, absent = _exporters()
        for first, spec in enumerate(exporters):
            for word in ("", "o2", "int8", "tuned"):
                check_output(_next_to(folder, spec.name if first else "", word))
        weights = weights_of(resolve(MODEL))
        cases = [_Case(name=_PYTORCH, artifact=weights, backend=plan_stage("export", WEIGHTS).backend.name)]
        for first, spec in enumerate(exporters):
            artifacts, missing = _artifacts(spec, _next_to(folder, spec.name if first else ""))
            cases += artifacts
            absent |= missing
        evaluations = [case.evaluate() for case in cases]
        # Accept any finite difference of outputs, because the table shows the accuracy.
        timed = measure_variants([case.variant for case in cases], _LOAD, _EFFORT, Traffic(), math.inf, watch)
        rows = []
        for case, evaluation, variant in zip(cases, evaluations, timed.variants, strict=True):
            if variant.error is not None:
                absent[case.name] = variant.error
                continue
            (cell,) = variant.cells
            gain = cell.ratio or SpeedupEstimate(value=1.0, low=1.0, high=1.0)
            same = sum(a == b for a, b in zip(evaluation.predictions, evaluations[0].predictions, strict=True))
            # The shipped weights are float16, but PyTorch loads them as float32: double the size.
            size = case.artifact.bytes * (2 if case.artifact is weights else 1)
            rows.append(
                DemoResultRow(
                    name=case.name,
                    accuracy=evaluation.value,
                    agreement=same / evaluation.rows,
                    median_ms=cell.latency.median,
                    p5_ms=cell.p5,
                    p95_ms=cell.latency.p95,
                    speedup=gain.value,
                    speedup_low=gain.low,
                    speedup_high=gain.high,
                    megabytes=size / 1e6,
                    compute_dtype=evaluation.compute_dtype,
                )
            )
        return DemoReport(
            rows=tuple(rows),
            absent=absent,
            disturbed=timed.disturbance.signs,
            tuned=_search(_next_to(folder, "", "tuned")),
            max_abs_difference=max(_differences(cases[1:])),
            queries=evaluations[0].rows,
            shape=_SHAPE,
            threads=available_processors(),
            seconds=time.perf_counter() - started,
        )


def _next_to(folder: Path, *words: str) -> Path:
    return folder.with_name("-".join((folder.name, *(word for word in words if word))))


def _exporters() -> tuple[list[BackendSpec], dict[str, str]]:
    """Return the backends that export here and run their exports on the host, by priority; and the unavailable ones with the reason."""
    able, absent = [], {}
    for spec in sorted(registry.describe_all()[0], key=lambda spec: -spec.priority):
        capability = spec.capability("export")
        if (
            capability is None
            or capability.produces == WEIGHTS
            or not capability.searched
            or "cpu" not in capability.devices
        ):
            continue
        probe = registry.probe(spec)
        if probe.available:
            able.append(spec)
        else:
            absent[spec.summary] = "; ".join(str(reason) for reason in probe.reasons)
    return able, absent


def _artifacts(spec: BackendSpec, folder: Path) -> tuple[list[_Case], dict[str, str]]:
    """Return the artifacts of a backend to measure, and the reasons why other rows of the result table are not available here."""
    backend_name = spec.name
    artifact = export(MODEL, folder, backend=spec.name)
    cases = [_Case(name=f"{backend_name}, float32", artifact=artifact, backend=spec.name)]
    absent = {}
    runs = spec.capability("run", artifact.format)
    for dtype in runs.dtypes if runs is not None else ():
        if dtype in ("float32", "float16", "int8"):
            continue
        options = SessionOptions.from_dict({"compute_dtype": dtype})
        try:
            ORTModel.from_plan(make_plan(artifact, RunPreferences(backend=spec.name, options=options))).close()
        except ConfigError as error:
            absent[f"{backend_name}, {dtype}"] = error.message
        else:
            cases.append(_Case(name=f"{backend_name}, {dtype}", artifact=artifact, backend=spec.name, options=options))
    best = artifact
    level = spec.capability("optimize", artifact.format)
    if level is not None and level.produces == artifact.format and "O2" in level.schemes:
        best = optimize(artifact, _next_to(folder, "o2"), backend=spec.name, level="O2")
        cases.append(_Case(name=f"{backend_name}, O2", artifact=best, backend=spec.name))
    schemes = spec.capability("quantize", artifact.format)
    if schemes is not None and schemes.schemes:
        scheme = schemes.schemes[0]
        calibration = CALIBRATION_SET if scheme.startswith("static") else None
        int8 = quantize(best, _next_to(folder, "int8"), backend=spec.name, scheme=scheme, calibration=calibration)
        cases.append(_Case(name=f"{backend_name}, {scheme}", artifact=int8, backend=spec.name))
    return cases, absent


def _search(out: Path) -> DemoSearch:
    """Search all backends and recipes that are available here."""
    tuning = tune(
        MODEL,
        out,
        data=TEST_SET,
        calibration=CALIBRATION_SET,
        max_drop=_MAX_DROP,
        sequence=[_SHAPE[1]],
        time_limit_s=_SEARCH_S,
    )
    gain = tuning.winner.speedup
    assert gain is not None
    return DemoSearch(
        winner=tuning.winner.name,
        speed=gain.value,
        speed_low=gain.low,
        speed_high=gain.high,
        drop=tuning.winner.drop or 0.0,
        max_drop=_MAX_DROP,
        candidates=len(tuning.trials),
        seconds=tuning.seconds,
    )


def _differences(cases: Sequence[_Case]) -> list[float]:
    """Return the differences of the exported graphs from PyTorch, as recorded by their exports."""
    return [float(case.artifact.manifest.steps[0].validation["max_abs_difference"]) for case in cases]


def render(report: DemoReport) -> str:
    """Return the table of the demo as text."""
    from rich.table import Table

    table = Table(title=f"BANKING77 intents, {report.queries} test queries")
    for column in ("variant", "accuracy", "agrees", "median", "p5 - p95", "times PyTorch (95 %)", "size"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in report.rows:
        table.add_row(
            row.name,
            f"{100 * row.accuracy:.2f} %",
            f"{100 * row.agreement:.2f} %",
            f"{row.median_ms:.2f} ms",
            f"{row.p5_ms:.2f} - {row.p95_ms:.2f}",
            str(SpeedupEstimate(value=row.speedup, low=row.speedup_low, high=row.speedup_high)),
            f"{row.megabytes:.1f} MB",
        )
    batch, sequence = report.shape
    missing = "".join(
        f"No row for {'; '.join(name for name in report.absent if report.absent[name] == why)}: {why.rstrip('.')}.\n"
        for why in dict.fromkeys(report.absent.values())
    )
    tuned = report.tuned
    gain = SpeedupEstimate(value=tuned.speed, low=tuned.speed_low, high=tuned.speed_high) if tuned is not None else None
    disturbed = f"Other programs disturbed the latencies: {'; '.join(report.disturbed)}.\n" if report.disturbed else ""
    search = (
        f"accel tune tested {tuned.candidates} candidates in {tuned.seconds:.0f} s. The fastest candidate that loses at most "
        f"{tuned.max_drop:g} points of accuracy is\n  {tuned.winner}:\n"
        f"  {gain} times as fast as PyTorch, {tuned.drop:.2f} points lost.\n"
        if tuned is not None
        else ""
    )
    return (
        f"{printed(table, 110)}{disturbed}{missing}{search}"
        f"Exported graphs differ from PyTorch by {report.max_abs_difference:.2g} at most.\n"
        "Accuracy was measured with one query per call. "
        f"Latency was measured with {batch} row of {sequence} tokens and {report.threads} threads.\n"
        "Each variant runs in its own process, and the processes run alternately.\n"
        f"Done in {report.seconds:.0f} s."
    )
