"""Time variants in turns, round by round, for benchmarks and searches."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import progress
from ...errors import SessionError
from ..processes import WorkerLostError
from .variants import CallTimings, LoadedVariantFacts, Traffic, Variant, Workload
from .worker import VariantProcess

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_WARMUP_CASES = 64
_LEAST_ROUNDS = 3
# Variants whose calls are shorter (in milliseconds) are always timed: skipping them would save only seconds, and a short disturbance of the
# machine could make them seem slow.
_SHORT_MS = 30.0


@dataclass(slots=True)
class MeasuredVariant:
    """A variant with its process and its measurements of all rounds that are finished."""

    variant: Variant
    worker: VariantProcess | None = None
    loaded: LoadedVariantFacts | None = None
    blocks: dict[str, list[CallTimings]] = field(default_factory=dict)
    warmup_s: float = 0.0
    peak_memory: int | None = None
    difference: float | None = None
    tolerance: float | None = None
    agreement: float | None = None
    error: str | None = None
    lost: bool = False  # its process ended or did not answer in time

    def attempt(self, action: Callable[[VariantProcess], Any]) -> Any:
        """Call `action` with the variant's process. If it fails, mark only this variant as failed and return `None`."""
        if self.worker is None:
            return None
        try:
            return action(self.worker)
        except SessionError as error:
            self.lost = isinstance(error, WorkerLostError)
            self.fail(error.message)
            return None

    def load(self) -> None:
        """Load the variant in its process."""
        self.loaded = self.attempt(lambda worker: worker.load())

    def fail(self, why: str) -> None:
        """Mark the variant as failed and end its process."""
        self.error = why
        logger.info("%s", why)
        self.close()

    def close(self) -> None:
        """End the variant's process."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def start(variants: Sequence[Variant], threads: int | None = None) -> list[MeasuredVariant]:
    """Start a process for each variant, then load the variants one after the other."""
    progress.report("starting processes")
    group = [MeasuredVariant(variant, VariantProcess(variant, threads)) for variant in variants]
    for measured in progress.track(group, "loading models"):
        measured.load()
    return group


def close(group: Sequence[MeasuredVariant]) -> None:
    """End all processes. They shut down at the same time."""
    for measured in group:
        if measured.worker is not None:
            measured.worker.hang_up()
    for measured in group:
        measured.close()


def restart(
    group: Sequence[MeasuredVariant],
    workloads: Sequence[Workload],
    calls: int,
    threads: int | None = None,
    *,
    backwards: bool = False,
) -> None:
    """Load the variants again in new processes, except for variants with `lasting`.

    The memory layout of a process changes its speed by some percent until the process ends: in measurements, two processes of the same
    variant differed by 1 to 5 %. More rounds in one process would not reveal this difference.

    Args:
        group: The variants; only variants with a running process are restarted.
        workloads: The workloads for warm-up.
        calls: Number of warm-up calls for each workload; they are not counted.
        threads: Threads of each variant; see `start`.
        backwards: Load the variants in reverse order.
    """
    running = [measured for measured in group if measured.worker is not None and not measured.variant.lasting]
    close(running)
    for measured in reversed(running) if backwards else running:
        measured.worker = VariantProcess(measured.variant, threads)
        measured.attempt(lambda worker: worker.load())
    first = [measured.warmup_s for measured in group]
    for workload in workloads:
        warm_up(group, workload, calls)
    for measured, seconds in zip(group, first, strict=True):
        measured.warmup_s = seconds


def warm_up(group: Sequence[MeasuredVariant], workload: Workload, calls: int, *, hopeless: float | None = None) -> None:
    """Make calls that are not part of the results: every case of the workload at least once, but at most 64 cases.

    Args:
        group: The baseline, followed by the other variants.
        workload: The calls.
        calls: Minimum number of calls.
        hopeless: Skip a variant if its calls take this many times as long as the baseline's, and more than 30 ms. The first
            call may compile and is ignored. `None`: never skip.
    """
    calls = max(calls, min(len(workload.cases), _WARMUP_CASES))
    base_ms = 0.0
    for index, measured in enumerate(group):
        measured.attempt(lambda worker: worker.prepare(workload))
        if hopeless is not None and index > 0:
            measured.warmup_s += _seconds(measured.attempt(lambda worker: worker.time(workload.name, 1)))
            _give_up_if_slow(measured, workload, base_ms, hopeless)
        block: CallTimings | None = measured.attempt(lambda worker: worker.time(workload.name, calls))
        measured.warmup_s += _seconds(block)
        if index == 0 and block is not None:
            base_ms = max(block.milliseconds[-3:])


def _seconds(block: CallTimings | None) -> float:
    return block.seconds if block is not None else 0.0


def _give_up_if_slow(measured: MeasuredVariant, workload: Workload, base_ms: float, factor: float) -> None:
    """Skip a variant after three calls that are all above the limit, or one call that takes a second longer than the limit.

    Very slow variants exist: on a Xeon with AMX, OpenVINO 2026.4 computes the float part of an int8 graph in float16 with its reference
    kernels, in 10 s per call. PyTorch needs 15 ms for the same call.
    """
    limit_ms = max(factor * base_ms, _SHORT_MS)
    best_ms = math.inf
    for _ in range(3):
        if measured.worker is None or best_ms <= limit_ms:
            return
        try:
            block = measured.worker.time(workload.name, 1, timeout_s=1 + limit_ms / 1000)
            best_ms = min(best_ms, block.milliseconds[0])
        except SessionError as error:
            late = isinstance(error, WorkerLostError) and error.late
            measured.lost = isinstance(error, WorkerLostError) and not late
            measured.fail(_too_slow(1000 + limit_ms, base_ms, workload) if late else error.message)
    if measured.worker is not None and best_ms > limit_ms:
        measured.fail(_too_slow(best_ms, base_ms, workload))


def _too_slow(took_ms: float, base_ms: float, workload: Workload) -> str:
    return (
        f"too slow to be timed: one call takes {took_ms:.0f} ms or more, and a call of the baseline takes {base_ms:.0f} ms "
        f"(workload {workload.name})"
    )


def take_turns(
    group: Sequence[MeasuredVariant],
    workload: Workload,
    *,
    rounds: int,
    calls: int,
    first: int = 0,
    traffic: Traffic | None = None,
    description: str = "measuring",
    budget_s: float | None = None,
) -> None:
    """Time `calls` calls of each variant in each round; rounds are numbered from `first`.

    After `budget_s` seconds no further round starts, but at least three rounds are run.
    """
    started = time.perf_counter()
    for turn in progress.track(range(first, first + rounds), f"{description} {workload.name}"):
        if budget_s is not None and turn - first >= _LEAST_ROUNDS and time.perf_counter() - started > budget_s:
            break
        traffic_now = replace(traffic, seed=traffic.seed + turn) if traffic is not None else None
        # Run every second round in reverse order, so that a variant does not always run after the same other variant.
        for measured in group if turn % 2 == 0 else reversed(group):
            block = measured.attempt(
                partial(_time, workload=workload.name, calls=calls, turn=turn, traffic=traffic_now)
            )
            if block is not None:
                measured.blocks.setdefault(workload.name, []).append(block)


def _time(worker: VariantProcess, *, workload: str, calls: int, turn: int, traffic: Traffic | None) -> CallTimings:
    return worker.time(workload, calls, turn * calls, traffic)


def check(group: Sequence[MeasuredVariant], workload: Workload, atol: float | None, *, judge: bool = True) -> None:
    """Compare each variant's outputs with the first variant's outputs. Variants whose difference is too large are not timed.

    Args:
        group: The baseline, followed by the other variants.
        workload: The workload whose first case is compared.
        atol: Accepted absolute difference. `None` for a default that depends on the dtype; any finite difference is then accepted
            for quantized variants.
        judge: `False` to accept any finite difference if `atol` is `None`.
    """
    import torch

    from ... import capture

    def answers(measured: MeasuredVariant) -> dict[str, torch.Tensor] | None:
        arrays = measured.attempt(lambda worker: worker.outputs(workload.name))
        return None if arrays is None else {name: torch.from_numpy(value) for name, value in arrays.items()}

    expected = answers(group[0])
    if expected is None:
        return
    for measured in group[1:]:
        outputs, loaded = answers(measured), measured.loaded
        if outputs is None or loaded is None:
            continue
        shared = {name: value for name, value in expected.items() if name in outputs} or expected
        difference, scale = capture.max_difference(outputs, shared)
        exact = loaded.compute_dtype in ("float32", "float16", "bfloat16") and not loaded.quantized
        limit = capture.tolerance(atol, loaded.compute_dtype, scale) if exact and judge else atol
        # Accept a larger difference than after an export, because the kernels of two libraries add numbers in different orders.
        if atol is None and limit is not None:
            limit *= 10 if loaded.compute_dtype == "float32" else 2
        measured.difference = max(difference, measured.difference or 0.0)
        measured.tolerance = limit
        first = next(iter(shared))
        if first in outputs and outputs[first].shape == shared[first].shape and shared[first].ndim >= 2:
            same = (outputs[first].argmax(-1) == shared[first].argmax(-1)).float().mean()
            measured.agreement = min(float(same), 1.0 if measured.agreement is None else measured.agreement)
        if not math.isfinite(difference) or (limit is not None and difference > limit):
            accepted = f"{limit:.3g}" if limit is not None else "any finite number"
            measured.fail(
                f"its outputs differ from the outputs of the baseline by {difference:.3g} for the workload {workload.name}; the largest "
                f"accepted difference is {accepted}."
            )
