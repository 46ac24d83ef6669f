"""Compare candidates by the objective and the constraints, and say why the others were rejected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..measuring.disturbance import Disturbance
from ..measuring.latency.results import Cell, VariantResult
from ..measuring.statistics import Ratio, geometric_mean, speedup
from .candidates import Candidate, Space
from .subject import Tried
from .trials import Goal, Trial

_EPSILON = 1e-9
# How far apart PyTorch's latencies may be in one search; on a quiet machine they are within a fifth.
_DISTURBED = 3.0


class Judge:
    """Compares candidates by an objective, and with constraints.

    Attributes:
        tried: Candidates that were timed, by name.
    """

    def __init__(self, goal: Goal) -> None:
        self._objective, self._constraints = goal.objective, goal.constraints
        self.tried: dict[str, Tried] = {}

    def ranked(self) -> list[Tried]:
        """Timed candidates, best first."""
        timed = [tried for tried in self.tried.values() if tried.screen is not None or tried.final is not None]
        return sorted(timed, key=lambda tried: -self.speed(tried))

    def speed(self, tried: Tried) -> float:
        """Return the number that orders candidates: the objective relative to PyTorch float32, by the last measurement.

        A screen is short, and another program can slow PyTorch in one heat only: latencies of screens
        are compared by their lower quintile, with PyTorch's over all heats of the same search. An earlier search that was
        interrupted may have run beside other programs: its results are compared with its own measurement of PyTorch. These
        numbers are not shown; see `speedup`.
        """
        return self._screened(tried) if tried.final is None else self.speedup(tried).value

    def speedup(self, tried: Tried) -> Ratio:
        """Return the objective relative to the baseline of the last measurement; tables show this number."""
        return self._ratio(tried.last.result, tried.last.anchor)

    def beside(self, one: Tried, other: Tried) -> Ratio:
        """Return how many times better one survivor is than another."""
        if _calls(one.last.anchor) == _calls(other.last.anchor):
            # They took turns in the same rounds.
            return self._ratio(one.last.result, other.last.result)
        first, second = self.speedup(one), self.speedup(other)
        low = first.low / second.high
        high = first.high / second.low if second.low > 0 else float("inf")
        return Ratio(value=first.value / second.value, low=low, high=high)

    def best(self, fitting: Sequence[Tried]) -> Tried | None:
        """Return the simplest candidate that is as good as the best one.

        As good is what `Ratio.equal` says of both; `Candidate.complexity` says what is simple. Of equally simple ones the first that
        was tried is kept.
        """
        equal = [one for one in fitting if one is fitting[0] or self.beside(fitting[0], one).equal]
        order = list(map(id, self.tried.values()))
        return min(equal, key=lambda one: (one.candidate.complexity, order.index(id(one))), default=None)

    def _screened(self, tried: Tried) -> float:
        """The objective relative to PyTorch float32, by the screen."""
        if self._objective != "latency":
            return self.speedup(tried).value
        screen = tried.last
        beside = [t.screen for t in self.tried.values() if t.screen is not None and t.screen.search == screen.search]
        anchors = [_quintiles(other.anchor) for other in beside or [screen]]
        base = [sorted(cell)[len(cell) // 2] for cell in zip(*anchors, strict=True)]
        return geometric_mean([a / b for a, b in zip(base, _quintiles(screen.result), strict=True)])

    def measured_again(self, trial: Trial, winner: Tried) -> Trial:
        """Return the winner's trial with its last measurement."""
        gain = self.speedup(winner)
        return replace(
            trial, result=winner.last.result, speed=gain.value, speedup=gain, disturbed=winner.last.disturbance.signs
        )

    def disturbance(self, winner: Tried) -> Disturbance:
        """Signs of other programs, while the winner was measured and in all latencies of PyTorch."""
        found = winner.last.disturbance
        more = self.disturbed()
        return replace(found, signs=(*found.signs, more)) if more else found

    def disturbed(self) -> str:
        """Say how far apart the latencies of PyTorch are where other programs ran during the search; else empty."""
        found: dict[str, list[float]] = {}
        for anchor in (one.anchor for t in self.tried.values() for one in (t.screen, t.final) if one is not None):
            for cell, ms in zip(anchor.cells, _quintiles(anchor), strict=True):
                found.setdefault(cell.workload, []).append(ms)
        for workload, times in found.items():
            if max(times) > _DISTURBED * min(times):
                return f"PyTorch float32 took {min(times):.3g} ms for {workload} in one measurement and {max(times):.3g} ms in another"
        return ""

    def _ratio(self, result: VariantResult, baseline: VariantResult) -> Ratio:
        """The objective relative to a baseline in the same rounds; larger is better. Sizes are exact."""
        if self._objective == "size":
            exact = (baseline.bytes or 1) / (result.bytes or 1)
            return Ratio(value=exact, low=exact, high=exact)
        # With a time limit one of two may have lost rounds at the end.
        pairs = [
            (a[: len(b)], b[: len(a)])
            for a, b in zip(map(self._costs, baseline.cells), map(self._costs, result.cells), strict=True)
        ]
        return speedup([a for a, _ in pairs], [b for _, b in pairs])

    def _costs(self, cell: Cell) -> list[float]:
        """Cost of each round: latency, time a call with all callers together, or processor time a call."""
        if self._objective == "latency":
            return cell.round_ms
        spent = cell.round_seconds if self._objective == "throughput" else cell.round_processor_seconds
        return [max(seconds, 1e-9) / len(calls) for seconds, calls in zip(spent, cell.milliseconds, strict=True)]

    def cheap_violation(self, tried: Tried) -> str:
        """Why a candidate cannot win, as far as the screen tells."""
        limits, screen = self._constraints, tried.last.result
        size, memory = tried.made.facts.bytes / 1e6, (screen.peak_memory_bytes or 0) / 1e6
        if limits.max_size_mb is not None and size > limits.max_size_mb:
            return f"{size:.1f} MB of files; accepted: {limits.max_size_mb:g}"
        if limits.max_memory_mb is not None and memory > limits.max_memory_mb:
            return f"{memory:.0f} MB of memory; accepted: {limits.max_memory_mb:g}"
        worst = max(cell.latency.median for cell in screen.cells)
        # A screen is short: only what is far above is out.
        if limits.max_latency_ms is not None and worst > 1.5 * limits.max_latency_ms:
            return f"median {worst:.2f} ms in the screen; accepted: {limits.max_latency_ms:g}"
        return ""

    def violations(self, tried: Tried) -> dict[str, float]:
        """Return by how much a candidate misses each constraint."""
        limits, missed = self._constraints, {}
        last, found = tried.final or tried.screen, tried.found
        shown = last.result if last is not None else None
        if limits.max_drop is not None and found is not None and found.comparison is not None:
            missed["max_drop"] = found.comparison.excess(limits.max_drop)
        if limits.min_accuracy is not None and found is not None:
            missed["min_accuracy"] = limits.min_accuracy - found.scored.value
        if limits.max_latency_ms is not None and shown is not None:
            missed["max_latency_ms"] = max(c.latency.median for c in shown.cells) - limits.max_latency_ms
        if limits.max_memory_mb is not None and shown is not None:
            missed["max_memory_mb"] = _memory_mb(shown) - limits.max_memory_mb
        if limits.max_size_mb is not None:
            missed["max_size_mb"] = tried.made.facts.bytes / 1e6 - limits.max_size_mb
        return {name: by for name, by in missed.items() if by > _EPSILON}

    def finals(self) -> list[Tried]:
        """Candidates that were measured in full, best first."""
        return [t for t in self.ranked() if t.final is not None and t.found is not None]

    def trials(self, winner: Tried, failed: Mapping[str, tuple[Candidate | None, str]], space: Space) -> list[Trial]:
        """Return every candidate, best first, each with the reason why it is not the winner."""
        finals = self.finals()
        made = [self._trial(tried, winner, finals) for tried in self.ranked()]
        for name, (candidate, reason) in failed.items():
            backend, device = (candidate.backend, candidate.device) if candidate else ("", "")
            made.append(Trial(name=name, backend=backend, device=device, reason=reason))
        made += [Trial(name=skipped.name, backend="", device="", reason=skipped.reason) for skipped in space.skipped]
        return made

    def _trial(self, tried: Tried, winner: Tried, finals: Sequence[Tried]) -> Trial:
        found, facts, shown = tried.found, tried.made.facts, tried.last
        compared = found.comparison if found is not None else None
        return Trial(
            name=str(tried.candidate),
            backend=tried.candidate.backend,
            device=tried.candidate.device,
            options=shown.result.options,
            digest=facts.digest,
            bytes=facts.bytes,
            speed=(gain := self.speedup(tried)).value,
            speedup=gain,
            result=tried.final.result if tried.final is not None else None,
            disturbed=shown.disturbance.signs,
            by_batch=found.by_batch if found is not None else {},
            **(compared.in_a_table() if compared is not None else {}),
            front=tried is winner or (tried in finals and not self._dominated(tried, finals)),
            winner=tried is winner,
            reason=self._why_not(tried, winner),
        )

    def _dominated(self, tried: Tried, finals: Iterable[Tried]) -> bool:
        """Whether another one is at least as good in both speed and accuracy, and better in one."""
        mine = (self.speed(tried), _worth(tried))
        others = [(self.speed(other), _worth(other)) for other in finals]
        return any(o[0] >= mine[0] and o[1] >= mine[1] and o != mine for o in others)

    def _why_not(self, tried: Tried, winner: Tried) -> str:
        if tried is winner:
            return ""
        if tried.reason:
            return tried.reason
        if tried.found is None:
            return f"screened out: {self.speedup(tried)} times PyTorch float32 in the short measurement, where others did better"
        if missed := self.violations(tried):
            return "; ".join(f"misses {name} by {by:.4g}" for name, by in missed.items())
        found = self.beside(winner, tried)
        if found.equal:
            return f"fits, and is as good as the winner, which is simpler: the winner is {found} times as good"
        if found.value > 1:
            return f"fits, and the winner is {found} times as good"
        return f"fits, and is better than the winner ({found}), which is as good as the best and simpler"


def _calls(result: VariantResult) -> list[tuple[tuple[float, ...], ...]]:
    return [cell.milliseconds for cell in result.cells]


def _memory_mb(result: VariantResult) -> float:
    """Peak memory; infinite where the system does not tell it, so that no limit holds."""
    return math.inf if result.peak_memory_bytes is None else result.peak_memory_bytes / 1e6


def _worth(tried: Tried) -> float:
    """Its metric, larger is better."""
    assert tried.found is not None
    value = tried.found.scored.value
    return value if tried.found.higher_is_better else -value


def _quintiles(result: VariantResult) -> list[float]:
    """The latency that a fifth of the calls stay below, of each workload."""
    found = []
    for cell in result.cells:
        ordered = sorted(t for block in cell.milliseconds for t in block)
        found.append(ordered[len(ordered) // 5])
    return found
