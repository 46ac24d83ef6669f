"""Latencies of a search: short heats of a few candidates next to the baseline, and a long one of the survivors."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from .. import progress
from ..errors import BudgetError, SessionError
from ..measuring.disturbance import Disturbance, MachineWatch
from ..measuring.latency import rounds, workloads
from ..measuring.latency.results import Cell, VariantResult, result
from ..measuring.latency.rounds import Measured
from ..measuring.latency.variants import Traffic, Variant, Workload
from ..measuring.latency.worker import Worker
from .builder import LATE, Builder
from .store import Store
from .subject import Clock, Subject, Tried, Work

logger = logging.getLogger(__name__)

_HEAT = 6  # candidates that are loaded at once, beside PyTorch
_WARMUP = 6
_RESERVE_S = 2.0  # for ending the processes of a heat


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How long a measurement is.

    Attributes:
        rounds: How often the variants take turns.
        calls: Calls of each in a round.
        budget_s: For each workload; three rounds are made in any case.
        hopeless: A candidate whose first calls take this many times as long as PyTorch's is not timed.
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
        work: The calls.
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
        work: Work,
        store: Store,
        clock: Clock,
        builder: Builder,
        *,
        callers: int,
        watch: MachineWatch | None = None,
    ) -> None:
        self._subject, self._work, self._store, self._clock, self._builder = subject, work, store, clock, builder
        self.traffic = Traffic(callers=callers)
        self._search = secrets.token_hex(8)
        self._watch = watch or MachineWatch()
        self._anchor: Measured | None = None
        self._workloads: list[Workload] = []
        # A guess until the first heat: processes start, import and load within it.
        self._heat_s, self._load_s = 10.0, 5.0

    def close(self) -> None:
        """End the baseline's process."""
        if self._anchor is not None:
            self._anchor.close()

    def lengths(self, limits: Mapping[str, int]) -> Iterator[int]:
        """Lengths that the calls have, where a model has these limits."""
        if self._work.texts is None:
            yield from self._work.sequence
            return
        for workload in self._text_workloads(limits):
            yield from (case["input_ids"].shape[1] for case in workload.cases)

    def screen(self, group: Sequence[Tried], share: float, *, hopeless: float | None) -> None:
        """Short measurements, a few candidates at a time, until a share of the time limit is used up.

        Args:
            group: What to measure; each gets `screen` and `anchor`, or a reason why not.
            share: Of the time limit.
            hopeless: See `Amount`.
        """
        waiting = []
        for tried in group:
            if (known := self._store.get("screens", self._key(tried, "screen"))) is not None:
                tried.screen, tried.anchor, tried.disturbance = _results(known)
                tried.screened_in = str(known.get("search") or tried.candidate)
            else:
                waiting.append(tried)
        amount = Amount(rounds=SCREEN.rounds, calls=SCREEN.calls, budget_s=SCREEN.budget_s, hopeless=hopeless)
        for i in range(0, len(waiting), _HEAT):
            heat = waiting[i : i + _HEAT]
            # A heat that would not be done in time is not begun. The first one is: nothing can win without it.
            first = self._anchor is None
            if not first and self._clock.left(share) < self._heat_s:
                for tried in heat:
                    tried.reason = LATE
                continue
            try:
                timed = self._heat(heat, amount, "screening")
            except _LateError as error:
                if first:
                    raise BudgetError(
                        f"The time limit of {self._clock.limit_s:g} s ended before anything was timed.",
                        fix="give it more time: time_limit_s=..., --time-limit.",
                    ) from error
                for tried in heat:
                    tried.reason = LATE
                continue
            for tried, record, lost in timed:
                tried.screen, tried.anchor, tried.disturbance = _results(record)
                tried.screened_in = self._search
                # A process that died or was cut off may do better the next time.
                if not lost:
                    self._store.put("screens", self._key(tried, "screen"), {**record, "search": self._search})

    def finals(self, group: Sequence[Tried]) -> None:
        """Longer measurements of the survivors, all side by side; each gets `final` and `final_anchor`.

        With too little time left, the screens have to do.
        """
        waiting = []
        for tried in group:
            if (known := self._store.get("finals", self._key(tried, "final"))) is not None:
                tried.final, tried.final_anchor, tried.disturbance = _results(known)
            else:
                waiting.append(tried)
        if not waiting:
            return
        left = (self._clock.left() - self._load_s - _RESERVE_S) / max(len(self._workloads), 1)
        budget = min(FINAL.budget_s, left)
        amount = Amount(rounds=FINAL.rounds, calls=FINAL.calls, budget_s=budget)
        timed = None
        if budget >= 1:
            with suppress(_LateError):
                timed = self._heat(waiting, amount, "timing")
        if timed is None:
            for tried in waiting:
                tried.final, tried.final_anchor = tried.screen, tried.anchor
            return
        for tried, record, _ in timed:
            found, anchor, disturbance = _results(record)
            if found.error is not None:
                tried.reason = found.error
                continue
            tried.final, tried.final_anchor, tried.disturbance = found, anchor, disturbance
            if budget == FINAL.budget_s:
                self._store.put("finals", self._key(tried, "final"), record)

    def alone(self, tried: Tried) -> tuple[VariantResult, VariantResult, Disturbance]:
        """One survivor beside PyTorch only, as it will be used, PyTorch, and what the machine did meanwhile.

        Beside several others every call finds the caches full of theirs: 10 to 15 % slower (MiniLM 1x32 in int8). With too
        little time left, `final` has to do.
        """
        assert tried.final is not None
        assert tried.final_anchor is not None
        side_by_side = (tried.final, tried.final_anchor, tried.disturbance)
        record = self._store.get("alone", self._key(tried, "alone"))
        if record is None:
            left = (self._clock.left() - self._load_s - _RESERVE_S) / max(len(self._workloads), 1)
            if left < 1:
                return side_by_side
            amount = Amount(rounds=FINAL.rounds, calls=FINAL.calls, budget_s=min(FINAL.budget_s, left))
            try:
                record = self._heat([tried], amount, "timing the winner")[0][1]
            except _LateError:
                return side_by_side
            self._store.put("alone", self._key(tried, "alone"), record)
        found, anchor, disturbance = _results(record)
        return (found, anchor, disturbance) if found.error is None else side_by_side

    def _key(self, tried: Tried, kind: str) -> dict[str, Any]:
        return {
            "what": tried.identity,
            "kind": kind,
            "amount": asdict(SCREEN if kind == "screen" else FINAL),
            "work": self._work.key(),
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
        """Each candidate with its result and that of PyTorch, taken in turns, and whether its process was lost."""
        for tried in heat:
            self._builder.files(tried.made)
        started = time.perf_counter()
        # PyTorch and the candidates import at the same time.
        others = [Measured(v, Worker(v, self._work.threads, self._until())) for v in map(self._variant, heat)]
        group = others
        try:
            anchor = self._start_anchor()
            anchor.blocks = {}
            group = [anchor, *others]
            for one in progress.track(others, "loading"):
                one.loaded = one.attempt(lambda worker: worker.load())
            self._load_s = max(self._load_s, time.perf_counter() - started)
            for workload in self._workloads:
                rounds.warm_up(group, workload, _WARMUP, hopeless=amount.hopeless)
                rounds.check(group, workload, None, judge=False)
                rounds.take_turns(
                    group, workload, rounds=amount.rounds, calls=amount.calls, budget_s=amount.budget_s,
                    traffic=self.traffic, what=what,
                )  # fmt: skip
            for one in group:
                one.peak_memory = one.attempt(lambda worker: worker.peak_memory())
            base, *found = [asdict(result(one, anchor, self._workloads)) for one in group]
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
        """PyTorch float32, kept loaded for all heats, and the workloads, whose inputs it makes."""
        if self._anchor is not None:
            return self._anchor
        variant = self._subject.baseline
        anchor = self._anchor = Measured(variant, Worker(variant, self._work.threads, self._until()))
        anchor.loaded = anchor.attempt(lambda worker: worker.load())
        if anchor.worker is None or anchor.loaded is None:
            raise self._no_anchor(anchor)
        if self._work.call is not None:
            call = Workload(name="rows", batch=self._work.batch[0], sequence=None, cases=(self._work.call,))
            self._workloads = [call]
        elif self._work.texts is None:
            self._workloads = workloads.grid(anchor.worker, anchor.loaded, self._work.batch, self._work.sequence)
        else:
            self._workloads = self._text_workloads(anchor.loaded.limits)
        return anchor

    def _no_anchor(self, anchor: Measured) -> SessionError:
        name = self._subject.reference
        return SessionError(f"{name} failed: {anchor.error}", fix="run `accel benchmark MODEL` to see why.")

    def _text_workloads(self, limits: Mapping[str, int]) -> list[Workload]:
        assert self._work.texts is not None
        return [
            workloads.of_texts(
                self._work.texts, self._subject.folder, name=f"{size} texts", task=self._subject.task, batch=size,
                tokenize=False, max_length=self._work.max_length or limits.get("sequence"), seed=self._work.seed,
            )
            for size in self._work.batch
        ]  # fmt: skip


class _LateError(Exception):
    """The time limit ended while PyTorch was timed."""


def _round_ms(cell: Mapping[str, Any]) -> list[float]:
    return [median(calls) for calls in cell["milliseconds"]]


def _results(record: Mapping[str, Any]) -> tuple[VariantResult, VariantResult, Disturbance]:
    """Candidate, PyTorch and the machine, from what was measured now or what was remembered as JSON."""
    noticed = record["disturbance"]
    return (
        VariantResult.from_dict(record["result"]),
        VariantResult.from_dict(record["anchor"]),
        Disturbance(**{**noticed, "signs": tuple(noticed["signs"])}),
    )
