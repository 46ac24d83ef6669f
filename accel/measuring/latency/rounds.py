"""Time variants in turns, for benchmarks and searches."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import progress
from ...errors import SessionError
from ..processes import WorkerLostError
from ..statistics import Ratio, ratio, summarize
from .variants import Block, Loaded, Traffic, Variant, Workload
from .worker import Worker

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_WARMUP_CASES = 64
_LEAST_ROUNDS = 3
# A call this short is timed in any case: giving up would save a second or two, and one disturbance is as long as the call.
_SHORT_MS = 30.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of one variant, in milliseconds, in the order measured, a tuple for each round."""

    name: str
    rounds: tuple[tuple[float, ...], ...]

    @property
    def milliseconds(self) -> tuple[float, ...]:
        """All calls."""
        return tuple(itertools.chain.from_iterable(self.rounds))

    @property
    def median(self) -> float:
        """The middle one."""
        return summarize(self.milliseconds).median

    @property
    def spread(self) -> tuple[float, float]:
        """Fifth and ninety-fifth percentile."""
        ordered = sorted(self.milliseconds)
        return ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]

    @property
    def round_ms(self) -> list[float]:
        """The median of each round."""
        return [summarize(calls).median for calls in self.rounds]

    def speedup(self, baseline: Latencies) -> Ratio:
        """How many times faster than a baseline that took turns with it."""
        return ratio(baseline.rounds, self.rounds)


@dataclass(slots=True)
class Measured:
    """A variant while it is measured."""

    variant: Variant
    worker: Worker | None = None
    loaded: Loaded | None = None
    blocks: dict[str, list[Block]] = field(default_factory=dict)
    warmup_s: float = 0.0
    peak_memory: int | None = None
    difference: float | None = None
    tolerance: float | None = None
    agreement: float | None = None
    error: str | None = None
    lost: bool = False  # its process died or did not answer in time

    def attempt(self, action: Callable[[Worker], Any]) -> Any:
        """Call `action` with the worker; an error ends this variant only."""
        if self.worker is None:
            return None
        try:
            return action(self.worker)
        except SessionError as error:
            self.lost = isinstance(error, WorkerLostError)
            self.fail(error.message)
            return None

    def fail(self, why: str) -> None:
        """Give up on the variant."""
        self.error = why
        logger.info("%s", why)
        self.close()

    def close(self) -> None:
        """End its process."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def start(variants: Sequence[Variant], threads: int | None = None) -> list[Measured]:
    """Start a process for each variant and load them one after the other."""
    group = [Measured(variant, Worker(variant, threads)) for variant in variants]
    for one in progress.track(group, "loading"):
        one.loaded = one.attempt(lambda worker: worker.load())
    return group


def close(group: Sequence[Measured]) -> None:
    """End all processes, which shut down side by side."""
    for one in group:
        if one.worker is not None:
            one.worker.hang_up()
    for one in group:
        one.close()


def restart(
    group: Sequence[Measured],
    workloads: Sequence[Workload],
    calls: int,
    threads: int | None = None,
    *,
    backwards: bool = False,
) -> None:
    """Load the variants again, in new processes; lasting ones stay.

    Where memory comes to lie decides some percent of a process's speed, for as long as it lives (measured: two copies of
    a variant differ by 1 to 5 %), which no number of rounds with one process would show.

    Args:
        group: Those that still run are restarted.
        workloads: What they are warmed up for.
        calls: Calls of each workload that are not counted.
        threads: As for `start`.
        backwards: Whether to load the last one first.
    """
    running = [one for one in group if one.worker is not None and not one.variant.lasting]
    close(running)
    for one in reversed(running) if backwards else running:
        one.worker = Worker(one.variant, threads)
        one.attempt(lambda worker: worker.load())
    first = [one.warmup_s for one in group]
    for workload in workloads:
        warm_up(group, workload, calls)
    for one, seconds in zip(group, first, strict=True):
        one.warmup_s = seconds


def warm_up(group: Sequence[Measured], workload: Workload, calls: int, *, hopeless: float | None = None) -> None:
    """Make calls that are not counted; every shape of the workload at least once, where there are not too many.

    Args:
        group: The baseline and the others.
        workload: The calls.
        calls: How many.
        hopeless: Give up on a variant whose calls after the first, which may compile, take this many times as long as the
            baseline's, and 30 ms. `None`: never.
    """
    calls = max(calls, min(len(workload.cases), _WARMUP_CASES))
    base_ms = 0.0
    for place, one in enumerate(group):
        one.attempt(lambda worker: worker.prepare(workload))
        if hopeless is not None and place > 0:
            one.warmup_s += _seconds(one.attempt(lambda worker: worker.time(workload.name, 1)))
            _give_up_if_slow(one, workload, base_ms, hopeless)
        block: Block | None = one.attempt(lambda worker: worker.time(workload.name, calls))
        one.warmup_s += _seconds(block)
        if place == 0 and block is not None:
            base_ms = max(block.milliseconds[-3:])


def _seconds(block: Block | None) -> float:
    return block.seconds if block is not None else 0.0


def _give_up_if_slow(one: Measured, workload: Workload, base_ms: float, factor: float) -> None:
    """Give up after three calls that are all too slow, or one that is not done a second after it should be.

    Measured: OpenVINO 2026.4 computes the float part of an int8 graph in float16 with its reference kernels on a Xeon with AMX,
    in 10 s a call where PyTorch takes 15 ms.
    """
    limit_ms = max(factor * base_ms, _SHORT_MS)
    best_ms = math.inf
    for _ in range(3):
        if one.worker is None or best_ms <= limit_ms:
            return
        try:
            block = one.worker.time(workload.name, 1, timeout_s=1 + limit_ms / 1000)
            best_ms = min(best_ms, block.milliseconds[0])
        except SessionError as error:
            late = isinstance(error, WorkerLostError) and error.late
            one.lost = isinstance(error, WorkerLostError) and not late
            one.fail(_too_slow(1000 + limit_ms, base_ms, workload) if late else error.message)
    if one.worker is not None and best_ms > limit_ms:
        one.fail(_too_slow(best_ms, base_ms, workload))


def _too_slow(took_ms: float, base_ms: float, workload: Workload) -> str:
    return f"too slow to be timed: a call takes {took_ms:.0f} ms or more, the baseline's {base_ms:.0f} ms ({workload.name})"


def take_turns(
    group: Sequence[Measured],
    workload: Workload,
    *,
    rounds: int,
    calls: int,
    first: int = 0,
    traffic: Traffic | None = None,
    what: str = "measuring",
    budget_s: float | None = None,
) -> None:
    """Time `calls` calls of each variant in each round, the first of which has the number `first`.

    After `budget_s` seconds and three rounds there are no more rounds.
    """
    started = time.perf_counter()
    for turn in progress.track(range(first, first + rounds), f"{what} {workload.name}"):
        if budget_s is not None and turn - first >= _LEAST_ROUNDS and time.perf_counter() - started > budget_s:
            break
        traffic_now = replace(traffic, seed=traffic.seed + turn) if traffic is not None else None
        # Every second round in reverse order, so that nobody always follows the same neighbour.
        for one in group if turn % 2 == 0 else reversed(group):
            block = one.attempt(partial(_time, workload=workload.name, calls=calls, turn=turn, traffic=traffic_now))
            if block is not None:
                one.blocks.setdefault(workload.name, []).append(block)


def _time(worker: Worker, *, workload: str, calls: int, turn: int, traffic: Traffic | None) -> Block:
    return worker.time(workload, calls, turn * calls, traffic)


def measure(
    variants: Sequence[Variant],
    feeds: Mapping[str, torch.Tensor],
    *,
    rounds: int = 8,
    calls: int = 25,
    warmup: int = 10,
    threads: int | None = None,
) -> list[Latencies]:
    """Time `model(**feeds)` of every variant.

    Args:
        variants: What to measure; all get the same inputs, warm-up and threads.
        feeds: Inputs by name, of the shape to be timed.
        rounds: How often the variants take turns.
        calls: Calls of a variant in each round.
        warmup: Calls before the first round.
        threads: Threads of each variant; what the process may use when `None`.

    Raises:
        SessionError: A variant failed; the message is its error.
    """
    arrays = {name: tensor.numpy() for name, tensor in feeds.items()}
    workload = Workload(name="given", batch=1, sequence=None, cases=(arrays,))
    group = start(variants, threads)
    try:
        warm_up(group, workload, warmup)
        take_turns(group, workload, rounds=rounds, calls=calls)
        for one in group:
            if one.error is not None:
                raise SessionError(one.error, fix="run it alone to see why.")
        return [
            Latencies(one.variant.name, tuple(tuple(block.milliseconds) for block in one.blocks["given"]))
            for one in group
        ]
    finally:
        for one in group:
            one.close()


def check(group: Sequence[Measured], workload: Workload, atol: float | None, *, judge: bool = True) -> None:
    """Compare each variant's outputs with the first one's; a variant that is too far off is not timed.

    Args:
        group: The baseline and the others.
        workload: Its first case is compared.
        atol: Accepted absolute difference; by dtype when `None`, and of quantized variants then any finite one.
        judge: `False` accepts any finite difference.
    """
    import torch

    from ... import capture

    def answers(one: Measured) -> dict[str, torch.Tensor] | None:
        found = one.attempt(lambda worker: worker.outputs(workload.name))
        return None if found is None else {name: torch.from_numpy(value) for name, value in found.items()}

    expected = answers(group[0]) if group else None
    if expected is None:
        return
    for one in group[1:]:
        found = answers(one)
        if found is None or one.loaded is None:
            continue
        shared = {name: value for name, value in expected.items() if name in found} or expected
        difference, scale = capture.max_difference(found, shared)
        exact = one.loaded.compute_dtype in ("float32", "float16", "bfloat16") and not one.loaded.quantized
        limit = capture.tolerance(atol, one.loaded.compute_dtype, scale) if exact and judge else atol
        # Float32 kernels of two libraries add in another order: ten times the tolerance of an export.
        if atol is None and limit is not None:
            limit *= 10 if one.loaded.compute_dtype == "float32" else 2
        one.difference = max(difference, one.difference or 0.0)
        one.tolerance = limit
        first = next(iter(shared))
        if first in found and found[first].shape == shared[first].shape and shared[first].ndim >= 2:
            same = (found[first].argmax(-1) == shared[first].argmax(-1)).float().mean()
            one.agreement = min(float(same), 1.0 if one.agreement is None else one.agreement)
        if not math.isfinite(difference) or (limit is not None and difference > limit):
            accepted = f"{limit:.3g}" if limit is not None else "any finite number"
            one.fail(
                f"its outputs differ from the baseline's by {difference:.3g} at {workload.name}; accepted: {accepted}."
            )
