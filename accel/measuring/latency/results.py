"""Results of a benchmark: one `VariantResult` for each variant, with one `Cell` for each workload, and their printed lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean, median
from typing import Any

import numpy as np

from ...artifact.atomic_folder_writing import checkpoint_weights
from ...artifact.json_writing import finite
from ...artifact.manifest import MANIFEST, Artifact
from ..disturbance import Disturbance
from ..statistics import LatencySummary, SpeedupEstimate, speedup, summarize
from .rounds import MeasuredVariant
from .variants import Variant, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Measurements of one variant on one workload.

    Attributes:
        workload: Name of the workload.
        batch: Number of rows in each call.
        sequence: Number of tokens in each row; `None` if they vary.
        latency: Summary of the latencies, in milliseconds per call.
        throughput: Rows per second.
        tokens_per_s: Tokens generated per second after each row's first token, summed over all rows; `None` if nothing is generated.
        processor_ms: Processor time per call in milliseconds, summed over all threads, including busy waiting.
        ratio: Speed-up over the baseline, from the median latency of each round.
        milliseconds: Latency of every call, one list for each round.
        round_seconds: Duration of each round in seconds, from its first call to its last result.
        round_processor_seconds: Processor time of each round in seconds, summed over all threads.
    """

    workload: str
    batch: int
    sequence: int | None
    latency: LatencySummary
    throughput: float
    processor_ms: float
    ratio: SpeedupEstimate | None
    milliseconds: tuple[tuple[float, ...], ...]
    tokens_per_s: float | None = None
    round_seconds: tuple[float, ...] = ()
    round_processor_seconds: tuple[float, ...] = ()

    @property
    def round_ms(self) -> list[float]:
        """Median latency of each round, in milliseconds."""
        return [median(calls) for calls in self.milliseconds]

    @property
    def p5(self) -> float:
        """Fifth percentile of the latencies of all calls, in milliseconds."""
        return float(np.percentile([ms for calls in self.milliseconds for ms in calls], 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """Measurements of one variant.

    Attributes:
        name: Name of the variant.
        backend: Backend that ran the variant; `pytorch` for PyTorch.
        device: Device that ran the variant.
        compute_dtype: Data type used for computation.
        threads: Number of threads that work on one call.
        options: Options of the session.
        notes: Settings that change the meaning of the numbers, such as TF32.
        path: Folder of the variant.
        bytes: Total size of its weights and graphs on disk, in bytes.
        load_s: Time to load the variant, in seconds, without imports.
        warmup_s: Duration of the warm-up calls, in seconds; compilers run during these calls.
        peak_memory_bytes: Peak memory of the whole process, including interpreter and PyTorch.
        max_abs_difference: Largest absolute difference from the baseline's outputs; `None` for the baseline.
        tolerance: Accepted difference; `None` if any finite difference is accepted, as for quantized variants.
        agreement: Fraction of equal predictions (argmax of the first output) of variant and baseline, in the compared calls.
        cells: One result for each workload.
        error: Reason why the variant was not measured; `None` if it was.
    """

    name: str
    backend: str = ""
    device: str = ""
    compute_dtype: str = ""
    threads: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    path: str = ""
    bytes: int | None = None
    load_s: float | None = None
    warmup_s: float | None = None
    peak_memory_bytes: int | None = None
    max_abs_difference: float | None = None
    tolerance: float | None = None
    agreement: float | None = None
    cells: tuple[Cell, ...] = ()
    error: str | None = None

    @property
    def median_ms(self) -> float:
        """Geometric mean of the workloads' median latencies, in milliseconds."""
        return geometric_mean([cell.latency.median for cell in self.cells])

    def lines(self) -> list[str]:
        """Return one line for each workload, in the format of transformer-deploy."""
        if self.error is not None:
            return [f"[{self.name}] failed: {self.error.splitlines()[0]}"]
        lines = []
        for cell in self.cells:
            s = cell.latency
            lines.append(
                f"[{self.name}] mean={s.mean:.2f}ms, sd={s.sd:.2f}ms, min={s.min:.2f}ms, max={s.max:.2f}ms, "
                f"median={s.median:.2f}ms, 95p={s.p95:.2f}ms, 99p={s.p99:.2f}ms ({cell.workload})"
                + (f", {cell.tokens_per_s:.1f} tokens/s" if cell.tokens_per_s is not None else "")
            )
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """Result of a benchmark.

    Attributes:
        task: Task of the model.
        baseline: Name of the variant with which all others are compared.
        machine: Facts about the machine that influence the numbers.
        settings: Rounds, calls, warm-up, threads and traffic.
        variants: One result for each variant, in the given order.
        seconds: Duration of the whole benchmark, in seconds.
        disturbance: Signs that other programs used the machine during the benchmark.
    """

    task: str
    baseline: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    variants: tuple[VariantResult, ...]
    seconds: float
    disturbance: Disturbance = field(default_factory=Disturbance)

    def __getitem__(self, name: str) -> VariantResult:
        """Return the result of the variant with this name."""
        return next(variant for variant in self.variants if variant.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return the benchmark as JSON values, including the latency of every call."""
        values: dict[str, Any] = finite(asdict(self))
        return values

    def __str__(self) -> str:
        return "\n".join(line for variant in self.variants for line in variant.lines())


def ratio_of(values: Mapping[str, Any]) -> SpeedupEstimate:
    """Read a speed-up from the JSON form of a benchmark or a search."""
    return SpeedupEstimate(**{**values, "high": math.inf if values["high"] is None else values["high"]})


def result(measured: MeasuredVariant, base: MeasuredVariant, workloads: Sequence[Workload]) -> VariantResult:
    """Return the result of a measured variant; `base` contains the measurements of the baseline."""
    cells: list[Cell] = []
    for workload in workloads:
        blocks = measured.blocks.get(workload.name, [])
        if measured.error is not None or not blocks:
            continue
        times = [block.milliseconds for block in blocks]
        flat = [t for block in times for t in block]
        reference = [median(block.milliseconds) for block in base.blocks.get(workload.name, [])]
        cells.append(
            Cell(
                workload=workload.name,
                batch=workload.batch,
                sequence=workload.sequence,
                latency=summarize(flat),
                throughput=workload.batch * len(flat) / sum(block.seconds for block in blocks),
                tokens_per_s=_tokens_per_s(workload, flat, cells),
                processor_ms=1000 * sum(block.processor_seconds for block in blocks) / len(flat),
                ratio=speedup([reference], [[median(calls) for calls in times]])
                if len(reference) == len(times)
                else None,
                milliseconds=tuple(times),
                round_seconds=tuple(block.seconds for block in blocks),
                round_processor_seconds=tuple(block.processor_seconds for block in blocks),
            )
        )
    facts: dict[str, Any] = {}
    if (loaded := measured.loaded) is not None:
        names = ("backend", "device", "compute_dtype", "threads", "options", "notes")
        facts = {"load_s": round(loaded.load_s, 3), **{name: getattr(loaded, name) for name in names}}
    return VariantResult(
        name=measured.variant.name,
        path=str(measured.variant.path),
        bytes=_bytes(measured.variant),
        warmup_s=round(measured.warmup_s, 3),
        peak_memory_bytes=measured.peak_memory,
        max_abs_difference=measured.difference,
        tolerance=measured.tolerance,
        agreement=measured.agreement,
        cells=tuple(cells),
        error=measured.error,
        **facts,
    )


def _tokens_per_s(workload: Workload, milliseconds: Sequence[float], before: Sequence[Cell]) -> float | None:
    """Return the tokens generated per second after the first token; the last result in `before` is the time until the first token."""
    if workload.new_tokens < 2 or not before:
        return None
    rest_ms = summarize(milliseconds).median - before[-1].latency.median
    return 1000 * workload.batch * (workload.new_tokens - 1) / rest_ms if rest_ms > 0 else None


def _bytes(variant: Variant) -> int | None:
    """Return the total size of the weights and graphs on disk, in bytes."""
    if (variant.path / MANIFEST).is_file():
        return Artifact.load(variant.path).bytes
    return sum(path.stat().st_size for path in checkpoint_weights(variant.path)) or None
