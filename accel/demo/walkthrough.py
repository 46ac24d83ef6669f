"""The demo's job: every backend that exports here, its optimizer and quantizer, accuracy, latency beside PyTorch, a search."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import progress
from ..artifact.manifest import Artifact
from ..artifact.writing import check_output
from ..backends import registry
from ..backends.plan import RunSettings, make_plan
from ..config import SessionOptions, available_processors
from ..errors import ConfigError
from ..interfaces.specs import WEIGHTS, BackendSpec
from ..measuring.disturbance import MachineWatch
from ..measuring.latency.benchmark import pytorch_variant
from ..measuring.latency.rounds import measure
from ..measuring.latency.variants import Variant
from ..measuring.statistics import Ratio
from ..models.base import ORTModel
from ..models.pipelines.pipeline import pipeline
from ..stages.export import export, weights_of
from ..stages.optimize import optimize
from ..stages.resolution import resolve
from ..tuning.accuracy_budget import quantize
from ..tuning.tune import tune
from . import CALIBRATION_SET, MODEL, TEST_SET, read_test_set

_SHAPE = (1, 16)
_MAX_DROP = 0.3
_SEARCH_S = 300.0
_TASK = "text-classification"
_PYTORCH = "PyTorch eager, float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """One line of the table.

    Attributes:
        name: Of the variant.
        accuracy: On the whole test set, one query a call, as latency is measured.
        agreement: Share of the answers that are PyTorch's.
        median_ms, p5_ms, p95_ms: Of all calls.
        speedup: Times PyTorch; see `accel.measuring.statistics.speedup`.
        speedup_low, speedup_high: Its 95 % interval.
        megabytes: Of weights and graphs.
        compute_dtype: What its kernels compute in.
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
    """What `accel tune` found for the same model and data.

    Attributes:
        winner: What it keeps.
        speed: Times PyTorch float32.
        speed_low, speed_high: Its 95 % interval.
        drop: Points lost on the whole test set.
        max_drop: Points that might be lost.
        candidates: How many it tried or rejected.
        seconds: For the search.
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
    """What the demo measured.

    Attributes:
        rows: One a variant; PyTorch first.
        max_abs_difference: Of the exported graphs from PyTorch.
        queries: Rows of the test set; all are evaluated.
        shape: Batch and sequence of the latency measurement.
        threads: Of each variant.
        seconds: For everything.
        absent: Rows that this machine or environment cannot have, with the reason.
        tuned: What a search found; `None` where none was made.
        disturbed: What says that other programs used the machine meanwhile.
    """

    rows: tuple[DemoRow, ...]
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
    """An artifact and how it is run."""

    name: str
    artifact: Artifact
    backend: str
    options: SessionOptions = field(default_factory=SessionOptions)

    @property
    def variant(self) -> Variant:
        """As what is timed."""
        return Variant(name=self.name, path=self.artifact.path, task=_TASK, backend=self.backend, options=self.options)


def run(out: Path | None = None) -> DemoReport:
    """Export the demo model, optimize and quantize it, evaluate each on the whole test set and time them against PyTorch;
    then let `accel.tune` find the fastest one by itself.

    Args:
        out: Where to keep the first float artifact; the others go beside it, with the backend and what was done (`-o2`,
            `-int8`, `-tuned`) behind its name. A temporary folder when `None`.
    """
    started = time.perf_counter()
    watch = MachineWatch()
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "artifact"
        exporters, absent = _exporters()
        for first, spec in enumerate(exporters):
            for word in ("", "o2", "int8", "tuned"):
                check_output(_beside(folder, spec.name if first else "", word))
        cases: list[_Case] = []
        for first, spec in enumerate(exporters):
            found, missing = _made(spec, _beside(folder, spec.name if first else ""))
            cases += found
            absent |= missing
        texts, labels = read_test_set()
        variants = [case.variant for case in cases]
        models = [
            ORTModel.from_plan(make_plan(case.artifact, RunSettings(backend=case.backend, options=case.options)))
            for case in cases
        ]
        sizes = [case.artifact.bytes for case in cases]
        weights = weights_of(resolve(MODEL))
        models.insert(0, ORTModel.from_plan(make_plan(weights)))
        variants.insert(0, replace(pytorch_variant(resolve(MODEL)), name=_PYTORCH))
        # The shipped weights are float16, PyTorch holds them in float32.
        sizes.insert(0, 2 * weights.bytes)
        predictions = [_predict(f"{v.name}: evaluating", m, texts) for v, m in zip(variants, models, strict=True)]
        dtypes = [model.compute_dtype for model in models]
        feeds = _feeds(models[-1])
        for model in models:
            model.close()
        timings = measure(variants, feeds)
        disturbed = watch.judge({timings[0].name: timings[0].round_ms}).signs
        gains = [timing.speedup(timings[0]) for timing in timings]
        rows = [
            DemoRow(
                name=timing.name,
                accuracy=_share(predicted, labels),
                agreement=_share(predicted, predictions[0]),
                median_ms=timing.median,
                p5_ms=timing.spread[0],
                p95_ms=timing.spread[1],
                speedup=gain.value,
                speedup_low=gain.low,
                speedup_high=gain.high,
                megabytes=size / 1e6,
                compute_dtype=dtype,
            )
            for timing, gain, predicted, size, dtype in zip(timings, gains, predictions, sizes, dtypes, strict=True)
        ]
        return DemoReport(
            rows=tuple(rows),
            absent=absent,
            disturbed=disturbed,
            tuned=_search(_beside(folder, "", "tuned")),
            max_abs_difference=max(_differences(cases)),
            queries=len(texts),
            shape=_SHAPE,
            threads=available_processors(),
            seconds=time.perf_counter() - started,
        )


def _beside(folder: Path, *words: str) -> Path:
    return folder.with_name("-".join((folder.name, *(word for word in words if word))))


def _exporters() -> tuple[list[BackendSpec], dict[str, str]]:
    """Backends that export here and run what they export on the host, the one that is chosen first first; and those that
    would, with the reason why they do not.
    """
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
        found = registry.probe(spec)
        if found.available:
            able.append(spec)
        else:
            absent[spec.summary] = "; ".join(str(reason) for reason in found.reasons)
    return able, absent


def _made(spec: BackendSpec, folder: Path) -> tuple[list[_Case], dict[str, str]]:
    """A backend's artifacts, and the rows that cannot be had here with the reason."""
    word = spec.name
    artifact = export(MODEL, folder, backend=spec.name)
    cases = [_Case(name=f"{word}, float32", artifact=artifact, backend=spec.name)]
    absent = {}
    runs = spec.capability("run", artifact.format)
    for dtype in runs.dtypes if runs is not None else ():
        if dtype in ("float32", "float16", "int8"):
            continue
        options = SessionOptions.from_dict({"compute_dtype": dtype})
        try:
            ORTModel.from_plan(make_plan(artifact, RunSettings(backend=spec.name, options=options))).close()
        except ConfigError as error:
            absent[f"{word}, {dtype}"] = error.message
        else:
            cases.append(_Case(name=f"{word}, {dtype}", artifact=artifact, backend=spec.name, options=options))
    best = artifact
    level = spec.capability("optimize", artifact.format)
    if level is not None and level.produces == artifact.format and "O2" in level.schemes:
        best = optimize(artifact, _beside(folder, "o2"), backend=spec.name, level="O2")
        cases.append(_Case(name=f"{word}, O2", artifact=best, backend=spec.name))
    schemes = spec.capability("quantize", artifact.format)
    if schemes is not None and schemes.schemes:
        scheme = schemes.schemes[0]
        calibration = CALIBRATION_SET if scheme.startswith("static") else None
        made = quantize(best, _beside(folder, "int8"), backend=spec.name, scheme=scheme, calibration=calibration)
        cases.append(_Case(name=f"{word}, {scheme}", artifact=made, backend=spec.name))
    return cases, absent


def _search(out: Path) -> DemoSearch:
    """The search over every backend and recipe here."""
    found = tune(
        MODEL,
        out,
        data=TEST_SET,
        calibration=CALIBRATION_SET,
        max_drop=_MAX_DROP,
        sequence=[_SHAPE[1]],
        time_limit_s=_SEARCH_S,
    )
    gain = found.winner.speedup
    assert gain is not None
    return DemoSearch(
        winner=found.winner.name,
        speed=gain.value,
        speed_low=gain.low,
        speed_high=gain.high,
        drop=found.winner.drop or 0.0,
        max_drop=_MAX_DROP,
        candidates=len(found.trials),
        seconds=found.seconds,
    )


def _differences(cases: Sequence[_Case]) -> list[float]:
    """Of the exported graphs from PyTorch, as their exports measured them."""
    return [float(case.artifact.manifest.steps[0].validation["max_abs_difference"]) for case in cases]


def _predict(what: str, model: ORTModel, texts: list[str]) -> list[str]:
    """The predicted intent of every text, one text a call, as latency is measured."""
    classify = pipeline(_TASK, model=model)
    results = classify((text for text in texts), batch_size=_SHAPE[0])
    return [result["label"] for result in progress.track(results, what, total=len(texts))]


def _feeds(model: ORTModel) -> dict[str, Any]:
    import torch

    ids = torch.randint(5, model.config.vocab_size, _SHAPE, generator=torch.Generator().manual_seed(0))
    values = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    return {spec.name: values[spec.name] for spec in model.sessions["model"].inputs}


def _share(found: Sequence[str], wanted: Sequence[str]) -> float:
    return sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted)


def render(report: DemoReport) -> str:
    """The table."""
    from io import StringIO

    from rich.console import Console
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
            str(Ratio(value=row.speedup, low=row.speedup_low, high=row.speedup_high)),
            f"{row.megabytes:.1f} MB",
        )
    stream = StringIO()
    Console(file=stream, width=110, markup=False).print(table)
    batch, sequence = report.shape
    missing = "".join(
        f"No row for {'; '.join(name for name in report.absent if report.absent[name] == why)}: {why.rstrip('.')}.\n"
        for why in dict.fromkeys(report.absent.values())
    )
    tuned = report.tuned
    gain = Ratio(value=tuned.speed, low=tuned.speed_low, high=tuned.speed_high) if tuned is not None else None
    disturbed = f"Other programs disturbed the latencies: {'; '.join(report.disturbed)}.\n" if report.disturbed else ""
    search = (
        f"accel tune looked at {tuned.candidates} candidates in {tuned.seconds:.0f} s; of those that lose at most "
        f"{tuned.max_drop:g} points it keeps\n  {tuned.winner}: {gain} times PyTorch, {tuned.drop:.2f} points lost.\n"
        if tuned is not None
        else ""
    )
    return (
        f"{stream.getvalue()}{disturbed}{missing}{search}"
        f"Exported graphs differ from PyTorch by {report.max_abs_difference:.2g} at most.\n"
        "Accuracy: one query a call. "
        f"Latency: batch {batch} x {sequence} tokens, {report.threads} threads, one process per variant taking turns.\n"
        f"Done in {report.seconds:.0f} s."
    )
