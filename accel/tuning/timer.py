"""Latencies of a search: short heats of a few candidates next to the baseline, and a long one of the survivors."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any

from .. import progress
from ..errors import BudgetError, SessionError
from ..measuring.disturbance import MachineWatch
from ..measuring.latency import rounds
from ..measuring.latency.results import Cell, result
from ..measuring.latency.rounds import Measured
from ..measuring.latency.variants import Traffic, Variant, Workload
from ..measuring.latency.worker import Worker
from ..measuring.latency.workloads import Load, text_workloads, workloads_of
from .builder import LATE, Builder
from .store import Store
from .subject import Clock, Measurement, Subject, Tried, load_key

logger = logging.getLogger(__name__)

_HEAT = 6  # candidates that are loaded at once, next to the baseline
_WARMUP = 6
_RESERVE_S = 2.0  # for ending the processes of a heat


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How long a measurement is.

    Attributes:
        rounds: How often the variants take turns.
        calls: Calls of each in a round.
        budget_s: For each workload; three rounds are made in any case.
        hopeless: A candidate whose first calls take this many times as long as the baseline's is not timed.
    """

    rounds: int
    calls: int
    budget_s: float
    hopeless: float | None = None


SCREEN = Amount(rounds=4, calls=6, budget_s=15)
FINAL = Amount(rounds=12, calls=12, budget_s=45)


class Timer:
    """Times candidates, unless an earlier search did.

    Args:
        subject: What is tuned.
        load: The calls.
        store: What earlier searches measured.
        clock: The time limit.
        builder: Makes files again that an earlier search removed.
        callers: Threads that call at once.
        watch: The machine since before anything of ours worked.

    Attributes:
        traffic: How calls arrive.
    """

    def __init__(
        self,
        subject: Subject,
        load: Load,
        store: Store,
        clock: Clock,
        builder: Builder,
        *,
        callers: int,
        watch: MachineWatch | None = None,
    ) -> None:
        self._subject, self._load, self._store, self._clock, self._builder = subject, load, store, clock, builder
        self.traffic = Traffic(callers=callers)
        self._search = secrets.token_hex(8)
        self._watch = watch or MachineWatch()
        self._anchor: Measured | None = None
        self._loadloads: list[Workload] = []
        # A guess until the first heat: processes start, import and load within it.
        self._heat_s, self._loading_s = 10.0, 5.0

    def close(self) -> None:
        """End the baseline's process."""
        if self._anchor is not None:
            self._anchor.close()

    def lengths(self, limits: Mapping[str, int]) -> Iterator[int]:
        """Lengths of the calls, for a model with these limits."""
        if self._load.texts is None:
            yield from self._load.sequence
            return
        for workload in text_workloads(self._load, self._subject.baseline, limits):
            yield from (case["input_ids"].shape[1] for case in workload.cases)

    def screen(self, group: Sequence[Tried], share: float, *, hopeless: float | None) -> None:
        """Short measurements, a few candidates at a time, until a share of the time limit is used up.

        Args:
            group: What to measure; each gets `screen`, or a reason why not.
            share: Of the time limit.
            hopeless: See `Amount`.
        """
        waiting = []
        for tried in group:
            if (record := self._store.get("screens", self._key(tried, "screen"))) is not None:
                tried.screen = Measurement.from_dict({"search": str(tried.candidate), **record})
            else:
                waiting.append(tried)
        for i in range(0, len(waiting), _HEAT):
            heat = waiting[i : i + _HEAT]
            # A heat that would not be done in time is not begun. The first one is: nothing can win without it.
            first = self._anchor is None
            timed = None
            if first or self._clock.left(share) >= self._heat_s:
                timed = self._in_time(heat, replace(SCREEN, hopeless=hopeless), "screening")
            if timed is None and first:
                raise BudgetError(
                    f"The time limit of {self._clock.limit_s:g} s ended before anything was timed.",
                    fix="give it more time: time_limit_s=..., --time-limit.",
                )
            if timed is None:
                for tried in heat:
                    tried.reason = LATE
            for tried, record, lost in timed or ():
                record["search"] = self._search
                tried.screen = Measurement.from_dict(record)
                # A process that died or was cut off may do better the next time.
                if not lost:
                    self._store.put("screens", self._key(tried, "screen"), record)

    def finals(self, group: Sequence[Tried], *, alone: bool = False) -> None:
        """Longer measurements of the survivors, all side by side; each gets `final`.

        With too little time left, the measurements before have to do.

        Args:
            group: What to measure.
            alone: One survivor next to the baseline only, as it will be used. Next to several others every call finds the caches full
                of theirs: 10 to 15 % slower (MiniLM 1x32 in int8).
        """
        kind, folder, what = ("alone", "alone", "timing the winner") if alone else ("final", "finals", "timing")
        records: list[tuple[Tried, dict[str, Any]]] = []
        waiting = []
        for tried in group:
            if (record := self._store.get(folder, self._key(tried, kind))) is not None:
                records.append((tried, record))
            else:
                waiting.append(tried)
            tried.final = tried.final or tried.screen
        left = (self._clock.left() - self._loading_s - _RESERVE_S) / max(len(self._loadloads), 1)
        amount = replace(FINAL, budget_s=min(FINAL.budget_s, left))
        if waiting and amount.budget_s >= 1:
            for tried, record, _ in self._in_time(waiting, amount, what) or ():
                records.append((tried, record))
                if amount == FINAL and record["result"]["error"] is None:
                    self._store.put(folder, self._key(tried, kind), record)
        for tried, record in records:
            measurement = Measurement.from_dict(record)
            if measurement.result.error is None:
                tried.final = measurement
            elif not alone:
                tried.final, tried.reason = None, measurement.result.error

    def _in_time(
        self, heat: Sequence[Tried], amount: Amount, what: str
    ) -> list[tuple[Tried, dict[str, Any], bool]] | None:
        """A heat; `None` where the time limit ended meanwhile."""
        try:
            return self._heat(heat, amount, what)
        except _LateError:
            return None

    def _key(self, tried: Tried, kind: str) -> dict[str, Any]:
        return {
            "what": tried.identity,
            "kind": kind,
            "amount": asdict(SCREEN if kind == "screen" else FINAL),
            "work": load_key(self._load),
            "callers": self.traffic.callers,
            "machine": self._subject.machine,
            "versions": self._subject.versions,
            "source": self._subject.digest,
            # What an older version remembered may lack a part.
            "cell": [field.name for field in fields(Cell)],
        }

    def _variant(self, tried: Tried) -> Variant:
        return self._subject.variant(tried.candidate, tried.made.path)

    def _until(self) -> float | None:
        left = self._clock.left()
        return None if left == math.inf else time.perf_counter() + left

    def _heat(self, heat: Sequence[Tried], amount: Amount, what: str) -> list[tuple[Tried, dict[str, Any], bool]]:
        """Time candidates in turns with the baseline: each with its record, and whether its process was lost."""
        for tried in heat:
            self._builder.files(tried.made)
        started = time.perf_counter()
        # The baseline and the candidates import at the same time.
        others = [Measured(v, Worker(v, self._load.threads, self._until())) for v in map(self._variant, heat)]
        group = others
        try:
            anchor = self._start_anchor()
            anchor.blocks = {}
            group = [anchor, *others]
            for one in progress.track(others, "loading"):
                one.loaded = one.attempt(lambda worker: worker.load())
            self._loading_s = max(self._loading_s, time.perf_counter() - started)
            for workload in self._loadloads:
                rounds.warm_up(group, workload, _WARMUP, hopeless=amount.hopeless)
                rounds.check(group, workload, None, judge=False)
                rounds.take_turns(
                    group, workload, rounds=amount.rounds, calls=amount.calls, budget_s=amount.budget_s,
                    traffic=self.traffic, what=what,
                )  # fmt: skip
            for one in group:
                one.peak_memory = one.attempt(lambda worker: worker.peak_memory())
            base, *found = [asdict(result(one, anchor, self._loadloads)) for one in group]
        finally:
            rounds.close(others)
        self._heat_s = time.perf_counter() - started
        if anchor.error is not None:
            if self._clock.left() <= 0:
                raise _LateError
            raise self._no_anchor(anchor)
        disturbance = asdict(self._watch.judge({cell["workload"]: _round_ms(cell) for cell in base["cells"]}))
        return [
            (tried, {"result": one_result, "anchor": base, "disturbance": disturbance}, one.lost)
            for tried, one_result, one in zip(heat, found, others, strict=True)
        ]

    def _start_anchor(self) -> Measured:
        """Load the baseline, which stays loaded for all heats and makes the inputs of the workloads."""
        if self._anchor is not None:
            return self._anchor
        variant = self._subject.baseline
        anchor = self._anchor = Measured(variant, Worker(variant, self._load.threads, self._until()))
        anchor.loaded = anchor.attempt(lambda worker: worker.load())
        if anchor.worker is None or anchor.loaded is None:
            raise self._no_anchor(anchor)
        self._loadloads = workloads_of(self._load, anchor.worker, anchor.loaded)
        return anchor

    def _no_anchor(self, anchor: Measured) -> SessionError:
        name = self._subject.reference
        return SessionError(f"{name} failed: {anchor.error}", fix="run `accel benchmark MODEL` to see why.")


class _LateError(Exception):
    """The time limit ended while the baseline was timed."""


def _round_ms(cell: Mapping[str, Any]) -> list[float]:
    return [median(calls) for calls in cell["milliseconds"]]
