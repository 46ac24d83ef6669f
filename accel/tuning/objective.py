"""Compare candidates by the objective and the constraints, and give the reason why each candidate did not win."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean

from ..measuring.disturbance import Disturbance
from ..measuring.latency.results import Cell, VariantResult
from ..measuring.statistics import SpeedupEstimate, speedup
from .candidates import Candidate, SearchSpace
from .search_data import TriedCandidate
from .trials import Goal, Trial

_EPSILON = 1e-9
# Largest accepted ratio between two latencies of PyTorch in one search; on a quiet machine they differ by at most a fifth.
_DISTURBED = 3.0


class CandidateComparison:
    """Compares candidates by an objective and by constraints.

    Attributes:
        tried: Timed candidates, by name.
    """

    def __init__(self, goal: Goal) -> None:
        self._objective, self._constraints = goal.objective, goal.constraints
        self.tried: dict[str, TriedCandidate] = {}

    def ranked(self) -> list[TriedCandidate]:
        """Return the timed candidates, best first."""
        timed = [tried for tried in self.tried.values() if tried.screen is not None or tried.final is not None]
        return sorted(timed, key=lambda tried: -self.speed(tried))

    def speed(self, tried: TriedCandidate) -> float:
        """Return the number by which candidates are ranked: the objective relative to the baseline, from the last measurement.

        For candidates with only a short measurement (screen), latencies are compared by their 20th percentile. The
        baseline's value is the median over all short measurements of the same search, because another program may have slowed the
        baseline in one of them. Results of an earlier, interrupted search are compared with the baseline of that search, because the
        machine may have been busy then. These numbers are not printed; see `speedup`.
        """
        return self._screened(tried) if tried.final is None else self.speedup(tried).value

    def speedup(self, tried: TriedCandidate) -> SpeedupEstimate:
        """Return the objective relative to the baseline of the same measurement; tables print this number."""
        return self._ratio(tried.last.result, tried.last.anchor)

    def advantage(self, survivor: TriedCandidate, other: TriedCandidate) -> SpeedupEstimate:
        """Return how many times better `survivor` is than `other`."""
        if _calls(survivor.last.anchor) == _calls(other.last.anchor):
            # Both candidates were measured in the same rounds.
            return self._ratio(survivor.last.result, other.last.result)
        first, second = self.speedup(survivor), self.speedup(other)
        low = first.low / second.high
        high = first.high / second.low if second.low > 0 else float("inf")
        return SpeedupEstimate(value=first.value / second.value, low=low, high=high)

    def best(self, fitting: Sequence[TriedCandidate]) -> TriedCandidate | None:
        """Return the simplest candidate that is as good as the best one.

        `SpeedupEstimate.equal` decides which candidates are as good. `Candidate.complexity` decides which is the simplest; among
        equally simple candidates, the one that was tried first wins.
        """
        equal = [tried for tried in fitting if tried is fitting[0] or self.advantage(fitting[0], tried).equal]
        order = list(map(id, self.tried.values()))
        return min(equal, key=lambda tried: (tried.candidate.complexity, order.index(id(tried))), default=None)

    def _screened(self, tried: TriedCandidate) -> float:
        """Return the objective relative to the baseline, from the short measurement."""
        if self._objective != "latency":
            return self.speedup(tried).value
        screen = tried.last
        screens = [t.screen for t in self.tried.values() if t.screen is not None and t.screen.search == screen.search]
        anchors = [_quintiles(other.anchor) for other in screens or [screen]]
        base = [sorted(cell)[len(cell) // 2] for cell in zip(*anchors, strict=True)]
        return geometric_mean([a / b for a, b in zip(base, _quintiles(screen.result), strict=True)])

    def measured_again(self, trial: Trial, winner: TriedCandidate) -> Trial:
        """Return the winner's trial, updated with its last measurement."""
        gain = self.speedup(winner)
        return replace(
            trial, result=winner.last.result, speed=gain.value, speedup=gain, disturbed=winner.last.disturbance.signs
        )

    def disturbance(self, winner: TriedCandidate) -> Disturbance:
        """Return the signs of other programs, from the winner's measurement and from all latencies of PyTorch."""
        disturbance = winner.last.disturbance
        more = self.disturbed()
        return replace(disturbance, signs=(*disturbance.signs, more)) if more else disturbance

    def disturbed(self) -> str:
        """Return a message if PyTorch's latencies in this search differ so much that other programs must have run; else an empty string."""
        latencies: dict[str, list[float]] = {}
        for anchor in (m.anchor for t in self.tried.values() for m in (t.screen, t.final) if m is not None):
            for cell, ms in zip(anchor.cells, _quintiles(anchor), strict=True):
                latencies.setdefault(cell.workload, []).append(ms)
        for workload, times in latencies.items():
            if max(times) > _DISTURBED * min(times):
                return f"PyTorch float32 took {min(times):.3g} ms for {workload} in one measurement and {max(times):.3g} ms in another"
        return ""

    def _ratio(self, result: VariantResult, baseline: VariantResult) -> SpeedupEstimate:
        """Return the objective relative to a baseline that was measured in the same rounds; larger is better. For the objective
        `size`, both ends of the interval equal the ratio.
        """
        if self._objective == "size":
            exact = (baseline.bytes or 1) / (result.bytes or 1)
            return SpeedupEstimate(value=exact, low=exact, high=exact)
        # If the time limit was reached, one variant may have fewer rounds than the other.
        pairs = [
            (a[: len(b)], b[: len(a)])
            for a, b in zip(map(self._costs, baseline.cells), map(self._costs, result.cells), strict=True)
        ]
        return speedup([a for a, _ in pairs], [b for _, b in pairs])

    def _costs(self, cell: Cell) -> list[float]:
        """Return the cost per call of each round: median latency, duration of the round, or processor time."""
        if self._objective == "latency":
            return cell.round_ms
        spent = cell.round_seconds if self._objective == "throughput" else cell.round_processor_seconds
        return [max(seconds, 1e-9) / len(calls) for seconds, calls in zip(spent, cell.milliseconds, strict=True)]

    def cheap_violation(self, tried: TriedCandidate) -> str:
        """Return why the short measurement excludes a candidate as winner; an empty string if it does not."""
        limits, screen = self._constraints, tried.last.result
        size, memory = tried.artifact.facts.bytes / 1e6, (screen.peak_memory_bytes or 0) / 1e6
        if limits.max_size_mb is not None and size > limits.max_size_mb:
            return f"its files have {size:.1f} MB; at most {limits.max_size_mb:g} MB are accepted"
        if limits.max_memory_mb is not None and memory > limits.max_memory_mb:
            return f"it needs {memory:.0f} MB of memory; at most {limits.max_memory_mb:g} MB are accepted"
        worst = max(cell.latency.median for cell in screen.cells)
        # The short measurement is not precise: reject only latencies far above the limit.
        if limits.max_latency_ms is not None and worst > 1.5 * limits.max_latency_ms:
            return f"its median latency is {worst:.2f} ms in the short measurement; at most {limits.max_latency_ms:g} ms are accepted"
        return ""

    def violations(self, tried: TriedCandidate) -> dict[str, float]:
        """Return by how much a candidate misses each constraint; constraints that it meets are left out."""
        limits, missed = self._constraints, {}
        last, accuracy = tried.final or tried.screen, tried.accuracy
        shown = last.result if last is not None else None
        if limits.max_drop is not None and accuracy is not None:
            missed["max_drop"] = tried.compared.excess(limits.max_drop)
        if limits.min_accuracy is not None and accuracy is not None:
            missed["min_accuracy"] = limits.min_accuracy - accuracy.scored.value
        if limits.max_latency_ms is not None and shown is not None:
            missed["max_latency_ms"] = max(c.latency.median for c in shown.cells) - limits.max_latency_ms
        if limits.max_memory_mb is not None and shown is not None:
            missed["max_memory_mb"] = _memory_mb(shown) - limits.max_memory_mb
        if limits.max_size_mb is not None:
            missed["max_size_mb"] = tried.artifact.facts.bytes / 1e6 - limits.max_size_mb
        return {name: by for name, by in missed.items() if by > _EPSILON}

    def finals(self) -> list[TriedCandidate]:
        """Return candidates with a long measurement and a measured accuracy, best first."""
        return [t for t in self.ranked() if t.final is not None and t.accuracy is not None]

    def trials(
        self, winner: TriedCandidate, failed: Mapping[str, tuple[Candidate | None, str]], space: SearchSpace
    ) -> list[Trial]:
        """Return a trial for every candidate, best first, each with the reason why it did not win."""
        finals = self.finals()
        trials = [self._trial(tried, winner, finals) for tried in self.ranked()]
        for name, (candidate, reason) in failed.items():
            backend, device = (candidate.backend, candidate.device) if candidate else ("", "")
            trials.append(Trial(name=name, backend=backend, device=device, reason=reason))
        trials += [Trial(name=skipped.name, backend="", device="", reason=skipped.reason) for skipped in space.skipped]
        return trials

    def _trial(self, tried: TriedCandidate, winner: TriedCandidate, finals: Sequence[TriedCandidate]) -> Trial:
        accuracy, facts, shown = tried.accuracy, tried.artifact.facts, tried.last
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
            by_batch=accuracy.by_batch if accuracy is not None else {},
            **(tried.compared.in_a_table() if accuracy is not None else {}),
            front=tried is winner or (tried in finals and not self._dominated(tried, finals)),
            winner=tried is winner,
            reason=self._why_not(tried, winner),
        )

    def _dominated(self, tried: TriedCandidate, finals: Iterable[TriedCandidate]) -> bool:
        """Return whether another candidate is at least as good in both speed and accuracy, and better in one of them."""
        mine = (self.speed(tried), _worth(tried))
        others = [(self.speed(other), _worth(other)) for other in finals]
        return any(o[0] >= mine[0] and o[1] >= mine[1] and o != mine for o in others)

    def _why_not(self, tried: TriedCandidate, winner: TriedCandidate) -> str:
        if tried is winner:
            return ""
        if tried.reason:
            return tried.reason
        if tried.accuracy is None:
            return f"only {self.speedup(tried)} times as good as PyTorch float32 in the short measurement; other candidates were better"
        if missed := self.violations(tried):
            return "; ".join(f"misses {name} by {by:.4g}" for name, by in missed.items())
        gain = self.advantage(winner, tried)
        if gain.equal:
            return f"it meets the constraints and is as good as the winner ({gain}), but the winner is simpler"
        if gain.value > 1:
            return f"it meets the constraints, but the winner is {gain} times as good"
        return (
            f"it meets the constraints and measured better than the winner ({gain}), but the winner is as good as the best "
            "candidate within the noise, and simpler"
        )


def _calls(result: VariantResult) -> list[tuple[tuple[float, ...], ...]]:
    return [cell.milliseconds for cell in result.cells]


def _memory_mb(result: VariantResult) -> float:
    """Return the peak memory in 10^6 bytes; infinity if the system does not report it, so that every memory limit is missed."""
    return math.inf if result.peak_memory_bytes is None else result.peak_memory_bytes / 1e6


def _worth(tried: TriedCandidate) -> float:
    """Return the metric, negated if smaller values are better."""
    assert tried.accuracy is not None
    value = tried.accuracy.scored.value
    return value if tried.accuracy.higher_is_better else -value


def _quintiles(result: VariantResult) -> list[float]:
    """Return the 20th percentile of the latencies of each workload, in milliseconds."""
    calls = (sorted(ms for block in cell.milliseconds for ms in block) for cell in result.cells)
    return [ordered[len(ordered) // 5] for ordered in calls]
