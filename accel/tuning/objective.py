"""Who is better, who fits, and why the others were not kept."""

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
        """What candidates are ordered by: the objective relative to PyTorch float32, by the last measurement.

        A screen is short, and another program's work can hit PyTorch in one heat and not in the next: latencies of screens
        are compared by their lower quintile, with PyTorch's over all heats of the same search. An earlier search that was
        interrupted may have run beside other programs: what it measured is compared with the PyTorch that it measured. These
        numbers are not shown; see `speedup`.
        """
        if tried.final is not None and tried.final_anchor is not None:
            return self._ratio(tried.final, tried.final_anchor).value
        return self._screened(tried)

    def speedup(self, tried: Tried) -> Ratio:
        """The objective relative to PyTorch float32 that took turns with it, by the last measurement, as it is shown everywhere."""
        if tried.final is not None and tried.final_anchor is not None:
            return self._ratio(tried.final, tried.final_anchor)
        assert tried.screen is not None
        assert tried.anchor is not None
        return self._ratio(tried.screen, tried.anchor)

    def beside(self, one: Tried, other: Tried) -> Ratio:
        """How many times better one survivor is than another."""
        assert one.final is not None
        assert other.final is not None
        if one.final_anchor is other.final_anchor or _calls(one.final_anchor) == _calls(other.final_anchor):
            # They took turns in the same rounds.
            return self._ratio(one.final, other.final)
        first, second = self.speedup(one), self.speedup(other)
        low = first.low / second.high
        high = first.high / second.low if second.low > 0 else float("inf")
        return Ratio(value=first.value / second.value, low=low, high=high)

    def best(self, fitting: Sequence[Tried]) -> Tried | None:
        """The survivor to keep, of those that fit, best first: the simplest one that is as good as the best.

        As good is what `Ratio.equal` says of both; `Candidate.complexity` says what is simple. Of equally simple ones the first that
        was tried is kept.
        """
        equal = [one for one in fitting if one is fitting[0] or self.beside(fitting[0], one).equal]
        order = list(map(id, self.tried.values()))
        return min(equal, key=lambda one: (one.candidate.complexity, order.index(id(one))), default=None)

    def _screened(self, tried: Tried) -> float:
        """The objective relative to PyTorch float32, by the screen."""
        assert tried.screen is not None
        assert tried.anchor is not None
        if self._objective != "latency":
            return self._ratio(tried.screen, tried.anchor).value
        beside = [t for t in self.tried.values() if t.screened_in == tried.screened_in]
        anchors = [_quintiles(t.anchor) for t in beside if t.anchor is not None] or [_quintiles(tried.anchor)]
        base = [sorted(cell)[len(cell) // 2] for cell in zip(*anchors, strict=True)]
        return geometric_mean([a / b for a, b in zip(base, _quintiles(tried.screen), strict=True)])

    def measured_again(self, trial: Trial, winner: Tried) -> Trial:
        """The winner's trial with what was measured of it last."""
        gain = self.speedup(winner)
        return replace(trial, result=winner.final, speed=gain.value, speedup=gain, disturbed=winner.disturbance.signs)

    def disturbance(self, winner: Tried) -> Disturbance:
        """What the machine did while the winner was measured, and what PyTorch's latencies in all of the search say."""
        found = winner.disturbance
        more = self.disturbed()
        return replace(found, signs=(*found.signs, more)) if more else found

    def disturbed(self) -> str:
        """What says that other programs ran beside the search, by PyTorch's own latencies; empty where nothing does."""
        found: dict[str, list[float]] = {}
        for anchor in (a for t in self.tried.values() for a in (t.anchor, t.final_anchor) if a is not None):
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
        """What each round cost: latency, time a call with all callers together, or processor time a call."""
        if self._objective == "latency":
            return cell.round_ms
        spent = cell.round_seconds if self._objective == "throughput" else cell.round_processor_seconds
        return [max(seconds, 1e-9) / len(calls) for seconds, calls in zip(spent, cell.milliseconds, strict=True)]

    def cheap_violation(self, tried: Tried) -> str:
        """Why a candidate cannot win, as far as the screen tells."""
        limits, screen = self._constraints, tried.screen
        assert screen is not None
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
        """By how much a candidate misses each constraint."""
        limits, missed = self._constraints, {}
        shown, found = tried.final or tried.screen, tried.found
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
        """Every candidate, best first, and why it is not the winner."""
        finals = self.finals()
        made = [self._trial(tried, winner, finals) for tried in self.ranked()]
        for name, (candidate, reason) in failed.items():
            backend, device = (candidate.backend, candidate.device) if candidate else ("", "")
            made.append(Trial(name=name, backend=backend, device=device, reason=reason))
        made += [Trial(name=skipped.name, backend="", device="", reason=skipped.reason) for skipped in space.skipped]
        return made

    def _trial(self, tried: Tried, winner: Tried, finals: Sequence[Tried]) -> Trial:
        found, facts, shown = tried.found, tried.made.facts, tried.final or tried.screen
        compared = found.comparison if found is not None else None
        return Trial(
            name=str(tried.candidate),
            backend=tried.candidate.backend,
            device=tried.candidate.device,
            options=shown.options if shown is not None else {},
            digest=facts.digest,
            bytes=facts.bytes,
            speed=(gain := self.speedup(tried)).value,
            speedup=gain,
            result=tried.final,
            disturbed=tried.disturbance.signs,
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


def _calls(result: VariantResult | None) -> list[tuple[tuple[float, ...], ...]]:
    return [cell.milliseconds for cell in result.cells] if result is not None else []


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
