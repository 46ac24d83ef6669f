"""Results of a benchmark: one result a variant, one cell a workload, and their printed lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from ...artifact.manifest import MANIFEST, Artifact
from ...artifact.writing import checkpoint_weights
from ..disturbance import Disturbance
from ..statistics import Ratio, Summary, geometric_mean, speedup, summarize
from .rounds import Measured
from .variants import Variant, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One variant on one workload.

    Attributes:
        workload: Its name.
        batch: Rows a call.
        sequence: Tokens a row; `None` where they vary.
        latency: Milliseconds a call.
        throughput: Rows a second.
        tokens_per_s: Tokens generated a second behind each row's first one, all rows together; `None` where none are.
        processor_ms: Processor time a call, all threads together, spinning included.
        ratio: How many times faster than the baseline, by the median latency of each round.
        milliseconds: Every call, a list for each round.
        round_seconds: Seconds of each round, from its first call to its last answer.
        round_processor_seconds: Processor time of each round, all threads together.
    """

    workload: str
    batch: int
    sequence: int | None
    latency: Summary
    throughput: float
    processor_ms: float
    ratio: Ratio | None
    milliseconds: tuple[tuple[float, ...], ...]
    tokens_per_s: float | None = None
    round_seconds: tuple[float, ...] = ()
    round_processor_seconds: tuple[float, ...] = ()

    @property
    def round_ms(self) -> list[float]:
        """The median latency of each round."""
        return [median(calls) for calls in self.milliseconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """One variant.

    Attributes:
        name: Its name.
        backend: What ran it; `pytorch` for PyTorch.
        device: The device that ran it.
        compute_dtype: What its kernels computed in.
        threads: That worked on one call.
        options: The session's options.
        notes: Settings that change what a number means, such as TF32.
        path: Its folder.
        bytes: Of its weights and graphs on disk.
        load_s: Seconds to load, imports excluded.
        warmup_s: Seconds of the calls before the first round; compilers work then.
        peak_memory_bytes: Of its whole process, interpreter and PyTorch included.
        max_abs_difference: From the baseline's outputs; `None` for the baseline.
        tolerance: What was accepted of it; `None`: reported, not judged, which is so for quantized variants.
        agreement: Share of rows of the checked calls whose largest output is at the same place as the baseline's.
        cells: One a workload.
        error: Why it was not measured.
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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> VariantResult:
        """From `dataclasses.asdict` and JSON."""
        cells = tuple(
            Cell(
                **{
                    **cell,
                    "latency": Summary(**cell["latency"]),
                    "ratio": Ratio(**cell["ratio"]) if cell["ratio"] else None,
                    "milliseconds": tuple(tuple(block) for block in cell["milliseconds"]),
                    "round_seconds": tuple(cell["round_seconds"]),
                    "round_processor_seconds": tuple(cell["round_processor_seconds"]),
                }
            )
            for cell in values["cells"]
        )
        return cls(**{**values, "cells": cells, "notes": tuple(values["notes"])})

    @property
    def median_ms(self) -> float:
        """Geometric mean of the workloads' medians."""
        return geometric_mean([cell.latency.median for cell in self.cells])

    def lines(self) -> list[str]:
        """One line a workload, in the form that transformer-deploy prints."""
        if self.error is not None:
            return [f"[{self.name}] failed: {self.error.splitlines()[0]}"]
        made = []
        for cell in self.cells:
            s = cell.latency
            made.append(
                f"[{self.name}] mean={s.mean:.2f}ms, sd={s.sd:.2f}ms, min={s.min:.2f}ms, max={s.max:.2f}ms, "
                f"median={s.median:.2f}ms, 95p={s.p95:.2f}ms, 99p={s.p99:.2f}ms ({cell.workload})"
                + (f", {cell.tokens_per_s:.1f} tokens/s" if cell.tokens_per_s is not None else "")
            )
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Result of a benchmark.

    Attributes:
        task: Of the model.
        baseline: Name of the variant that ratios and differences refer to.
        machine: Facts that the numbers depend on.
        settings: Rounds, calls, warm-up, threads and traffic.
        variants: One each, in the order given.
        seconds: For everything.
        disturbance: Whether other programs used the machine meanwhile.
    """

    task: str
    baseline: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    variants: tuple[VariantResult, ...]
    seconds: float
    disturbance: Disturbance = field(default_factory=Disturbance)

    def __getitem__(self, name: str) -> VariantResult:
        """The variant of that name."""
        return next(variant for variant in self.variants if variant.name == name)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, every latency included."""
        values: dict[str, Any] = without_infinity(asdict(self))
        return values

    def __str__(self) -> str:
        return "\n".join(line for variant in self.variants for line in variant.lines())


def without_infinity(value: Any) -> Any:
    """Replace infinite numbers, such as the interval of a single round, by `None`, because JSON has none."""
    if isinstance(value, Mapping):
        return {key: without_infinity(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinity(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def ratio_of(values: Mapping[str, Any]) -> Ratio:
    """The ratio in the JSON form of a benchmark or a search."""
    return Ratio(**{**values, "high": math.inf if values["high"] is None else values["high"]})


def result(one: Measured, base: Measured, workloads: Sequence[Workload]) -> VariantResult:
    """Return the result of a variant that was measured."""
    cells: list[Cell] = []
    for workload in workloads:
        blocks = one.blocks.get(workload.name, [])
        if one.error is not None or not blocks:
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
    loaded = one.loaded
    return VariantResult(
        name=one.variant.name,
        backend=loaded.backend if loaded else "",
        device=loaded.device if loaded else "",
        compute_dtype=loaded.compute_dtype if loaded else "",
        threads=loaded.threads if loaded else 0,
        options=loaded.options if loaded else {},
        notes=loaded.notes if loaded else (),
        path=str(one.variant.path),
        bytes=_bytes(one.variant),
        load_s=round(loaded.load_s, 3) if loaded else None,
        warmup_s=round(one.warmup_s, 3),
        peak_memory_bytes=one.peak_memory,
        max_abs_difference=one.difference,
        tolerance=one.tolerance,
        agreement=one.agreement,
        cells=tuple(cells),
        error=one.error,
    )


def _tokens_per_s(workload: Workload, milliseconds: Sequence[float], before: Sequence[Cell]) -> float | None:
    """Tokens after the first one over the time that they took; the previous cell has the time until the first token."""
    if workload.new_tokens < 2 or not before:
        return None
    behind = summarize(milliseconds).median - before[-1].latency.median
    return 1000 * workload.batch * (workload.new_tokens - 1) / behind if behind > 0 else None


def _bytes(variant: Variant) -> int | None:
    """Size of the weights and graphs on disk."""
    if (variant.path / MANIFEST).is_file():
        return Artifact.load(variant.path).bytes
    return sum(path.stat().st_size for path in checkpoint_weights(variant.path)) or None
