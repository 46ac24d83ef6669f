"""Time the candidates of a search: short measurements in small groups with the baseline, then a long one of the best candidates."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .. import progress
from ..artifact.json_reading import build
from ..errors import BudgetError, SessionError
from ..measuring.disturbance import MachineWatch
from ..measuring.latency import rounds
from ..measuring.latency.results import Cell, result
from ..measuring.latency.rounds import MeasuredVariant
from ..measuring.latency.variants import Traffic, Variant, Workload
from ..measuring.latency.worker import VariantProcess
from ..measuring.latency.workloads import WorkloadSettings, text_workloads, workloads_of
from .builder import LATE, ArtifactBuilder
from .search_data import Measurement, SearchSubject, TimeBudget, TriedCandidate, load_key
from .store import ResultStore

logger = logging.getLogger(__name__)

_HEAT = 6  # number of candidates that are loaded and timed together with the baseline (a group)
_WARMUP = 6
_RESERVE_S = 2.0  # seconds to end the processes of a group


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementLength:
    """Length of a measurement.

    Attributes:
        rounds: Number of rounds. In each round every variant runs once.
        calls: Calls of each variant in each round.
        budget_s: Maximum seconds for each workload; at least three rounds are measured.
        hopeless: Skip a candidate whose first calls take this many times as long as the baseline's.
    """

    rounds: int
    calls: int
    budget_s: float
    hopeless: float | None = None


SCREEN = MeasurementLength(rounds=4, calls=6, budget_s=15)
FINAL = MeasurementLength(rounds=12, calls=12, budget_s=45)


class CandidateTimer:
    """Times candidates, and reuses timings of earlier searches.

    Args:
        subject: The model to search for.
        load: The calls to time.
        store: Store with the results of earlier searches.
        clock: The time limit.
        builder: Builder that rebuilds files which an earlier search removed.
        callers: Number of threads that call at the same time.
        watch: Machine watch that was created before accel started to work; `None` to create one now.

    Attributes:
        traffic: How calls arrive.
    """

    def __init__(
        self,
        subject: SearchSubject,
        load: WorkloadSettings,
        store: ResultStore,
        clock: TimeBudget,
        builder: ArtifactBuilder,
        *,
        callers: int,
        watch: MachineWatch | None = None,
    ) -> None:
        self._subject, self._load, self._store, self._clock, self._builder = subject, load, store, clock, builder
        self.traffic = Traffic(callers=callers)
        self._search = secrets.token_hex(8)
        self._watch = watch or MachineWatch()
        self._anchor: MeasuredVariant | None = None
        self._workloads: list[Workload] = []
        # Estimated duration of a group and of its loading, in seconds, until the first group has been measured.
        self._heat_s, self._loading_s = 10.0, 5.0

    def close(self) -> None:
        """End the process of the baseline."""
        if self._anchor is not None:
            self._anchor.close()

    def lengths(self, limits: Mapping[str, int]) -> Iterator[int]:
        """Yield the sequence lengths of the timed calls. `limits` are the maximum sizes of the model's axes, by axis name."""
        if self._load.texts is None:
            yield from self._load.sequence
            return
        for workload in text_workloads(self._load, self._subject.baseline, limits):
            yield from (case["input_ids"].shape[1] for case in workload.cases)

    def screen(self, group: Sequence[TriedCandidate], share: float, *, hopeless: float | None) -> None:
        """Time candidates with short measurements, one group after the other, until a fraction of the time limit is used up.

        Args:
            group: Candidates to time. Each gets its `screen`, or a `reason` why it was not timed.
            share: Fraction of the time limit.
            hopeless: Skip a candidate whose first calls take this many times as long as the baseline's.
        """
        waiting = []
        for tried in group:
            if (record := self._store.get("screens", self._key(tried, "screen"))) is not None:
                tried.screen = _measurement({"search": str(tried.candidate), **record})
            else:
                waiting.append(tried)
        for i in range(0, len(waiting), _HEAT):
            heat = waiting[i : i + _HEAT]
            # Skip a group that would not finish in time. The first group always runs, because no candidate can win without it.
            first = self._anchor is None
            timed = None
            if first or self._clock.left(share) >= self._heat_s:
                timed = self._heat(heat, replace(SCREEN, hopeless=hopeless), "screening")
            if timed is None and first:
                raise BudgetError(
                    f"The time limit of {self._clock.limit_s:g} s ended before the first candidate was timed.",
                    fix="use a longer time limit: time_limit_s=... (--time-limit).",
                )
            if timed is None:
                for tried in heat:
                    tried.reason = LATE
            for tried, record, lost in timed or ():
                record["search"] = self._search
                tried.screen = _measurement(record)
                # If the process of a candidate ended early, do not store its result: the candidate may succeed next time.
                if not lost:
                    self._store.put("screens", self._key(tried, "screen"), record)

    def finals(self, group: Sequence[TriedCandidate], *, alone: bool = False) -> None:
        """Time candidates for longer, all of them together with the baseline; each gets its `final`.

        If too little time is left, the earlier measurements are used.

        Args:
            group: Candidates to time.
            alone: Whether `group` is one candidate that is timed only with the baseline, as in production. Next to several other
                processes, which fill the caches with their data, calls are 10 to 15 % slower (MiniLM 1x32 in int8).
        """
        kind, folder, description = ("alone", "alone", "timing the winner") if alone else ("final", "finals", "timing")
        records: list[tuple[TriedCandidate, dict[str, Any]]] = []
        waiting = []
        for tried in group:
            if (record := self._store.get(folder, self._key(tried, kind))) is not None:
                records.append((tried, record))
            else:
                waiting.append(tried)
            tried.final = tried.final or tried.screen
        left = (self._clock.left() - self._loading_s - _RESERVE_S) / max(len(self._workloads), 1)
        amount = replace(FINAL, budget_s=min(FINAL.budget_s, left))
        if waiting and amount.budget_s >= 1:
            for tried, record, _ in self._heat(waiting, amount, description) or ():
                records.append((tried, record))
                if amount == FINAL and record["result"]["error"] is None:
                    self._store.put(folder, self._key(tried, kind), record)
        for tried, record in records:
            measurement = _measurement(record)
            if measurement.result.error is None:
                tried.final = measurement
            elif not alone:
                tried.final, tried.reason = None, measurement.result.error

    def _key(self, tried: TriedCandidate, kind: str) -> dict[str, Any]:
        return {
            "what": tried.identity,
            "kind": kind,
            "amount": asdict(SCREEN if kind == "screen" else FINAL),
            "work": load_key(self._load),
            "callers": self.traffic.callers,
            "machine": self._subject.machine,
            "versions": self._subject.versions,
            "source": self._subject.digest,
            # The names of the fields are part of the key, because records written by an older version may lack some fields.
            "cell": [field.name for field in fields(Cell)],
        }

    def _variant(self, tried: TriedCandidate) -> Variant:
        return self._subject.variant(tried.candidate, tried.artifact.path)

    def _until(self) -> float | None:
        left = self._clock.left()
        return None if left == math.inf else time.perf_counter() + left

    def _heat(
        self, heat: Sequence[TriedCandidate], amount: MeasurementLength, description: str
    ) -> list[tuple[TriedCandidate, dict[str, Any], bool]] | None:
        """Time a group of candidates in turns with the baseline.

        Return for each candidate its record, and whether its process ended early; return `None` if the time limit was reached.
        """
        for tried in heat:
            self._builder.files(tried.artifact)
        started = time.perf_counter()
        progress.report("starting processes")
        # Start all processes before the baseline, so that all of them import at the same time.
        others = [
            MeasuredVariant(v, VariantProcess(v, self._load.threads, self._until())) for v in map(self._variant, heat)
        ]
        group = others
        try:
            anchor = self._start_anchor()
            anchor.blocks = {}
            group = [anchor, *others]
            for measured in progress.track(others, "loading models"):
                measured.load()
            self._loading_s = max(self._loading_s, time.perf_counter() - started)
            for workload in self._workloads:
                rounds.warm_up(group, workload, _WARMUP, hopeless=amount.hopeless)
                rounds.check(group, workload, None, judge=False)
                rounds.take_turns(
                    group, workload, rounds=amount.rounds, calls=amount.calls, budget_s=amount.budget_s,
                    traffic=self.traffic, description=description,
                )  # fmt: skip
            for measured in group:
                measured.peak_memory = measured.attempt(lambda worker: worker.peak_memory())
            base, *results = [result(measured, anchor, self._workloads) for measured in group]
        finally:
            rounds.close(others)
        self._heat_s = time.perf_counter() - started
        if anchor.error is not None:
            if self._clock.left() <= 0:
                return None
            raise self._no_anchor(anchor)
        disturbance = self._watch.judge({cell.workload: cell.round_ms for cell in base.cells})
        shared = {"anchor": asdict(base), "disturbance": asdict(disturbance)}
        return [
            (tried, {"result": asdict(timed), **shared}, measured.lost)
            for tried, timed, measured in zip(heat, results, others, strict=True)
        ]

    def _start_anchor(self) -> MeasuredVariant:
        """Load the baseline, which stays loaded for all groups and creates the inputs of the workloads; return it."""
        if self._anchor is not None:
            return self._anchor
        variant = self._subject.baseline
        anchor = self._anchor = MeasuredVariant(variant, VariantProcess(variant, self._load.threads, self._until()))
        anchor.load()
        if anchor.worker is None or anchor.loaded is None:
            raise self._no_anchor(anchor)
        self._workloads = workloads_of(self._load, anchor.worker, anchor.loaded)
        return anchor

    def _no_anchor(self, anchor: MeasuredVariant) -> SessionError:
        name = self._subject.reference
        return SessionError(
            f"The baseline of the search, {name}, failed: {anchor.error}",
            fix="run `accel benchmark MODEL` to see the full error.",
        )


def _measurement(record: Mapping[str, Any]) -> Measurement:
    """Read a measurement from its stored record."""
    return build(Measurement, record, "A saved measurement")
