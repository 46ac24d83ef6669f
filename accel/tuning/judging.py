"""Who is better, who fits, and why the others were not kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..measuring.latency.results import VariantResult
from ..measuring.statistics import geometric_mean
from .candidates import Candidate, Space
from .report import Goal, Trial
from .state import Tried

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
        """Best first."""
        return sorted(self.tried.values(), key=lambda tried: -self.speed(tried))

    def speed(self, tried: Tried) -> float:
        """The objective relative to PyTorch float32, by the last measurement.

        A screen is short, and another program's work can hit PyTorch in one heat and not in the next: latencies of screens
        are compared by their lower quintile, with PyTorch's over all heats of the same search. An earlier search that was
        interrupted may have run beside other programs: what it measured is compared with the PyTorch that it measured.
        """
        if tried.final is not None and tried.final_anchor is not None:
            return self._score(tried.final, tried.final_anchor)
        return self._screened(tried)

    def _screened(self, tried: Tried) -> float:
        """The objective relative to PyTorch float32, by the screen."""
        assert tried.screen is not None
        assert tried.anchor is not None
        if self._objective != "latency":
            return self._score(tried.screen, tried.anchor)
        beside = [t for t in self.tried.values() if t.screened_in == tried.screened_in]
        anchors = [_quintiles(t.anchor) for t in beside if t.anchor is not None] or [_quintiles(tried.anchor)]
        base = [sorted(cell)[len(cell) // 2] for cell in zip(*anchors, strict=True)]
        return geometric_mean([a / b for a, b in zip(base, _quintiles(tried.screen), strict=True)])

    def disturbed(self) -> str:
        """What says that other programs ran beside the search, by PyTorch's own latencies; empty where nothing does."""
        found: dict[str, list[float]] = {}
        for anchor in (a for t in self.tried.values() for a in (t.anchor, t.final_anchor) if a is not None):
            for cell, ms in zip(anchor.cells, _quintiles(anchor), strict=True):
                found.setdefault(cell.workload, []).append(ms)
        for workload, times in found.items():
            if max(times) > _DISTURBED * min(times):
                return (
                    f"PyTorch float32 took {min(times):.3g} ms for {workload} in one measurement and {max(times):.3g} ms in another: other "
                    "programs use these processors, and what was measured beside them compares nothing."
                )
        return ""

    def _score(self, result: VariantResult, anchor: VariantResult) -> float:
        """The objective relative to PyTorch float32; larger is better."""
        if self._objective == "size":
            return (anchor.bytes or 1) / (result.bytes or 1)
        pairs = list(zip(anchor.cells, result.cells, strict=True))
        if self._objective == "throughput":
            return geometric_mean([b.throughput / a.throughput for a, b in pairs])
        if self._objective == "cost":
            return geometric_mean([a.processor_ms / max(b.processor_ms, 1e-6) for a, b in pairs])
        return geometric_mean([a.latency.median / b.latency.median for a, b in pairs])

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
        shown = tried.final or tried.screen
        assert shown is not None
        found = tried.found
        if limits.max_drop is not None and found is not None and found.comparison is not None:
            missed["max_drop"] = found.comparison.excess(limits.max_drop)
        if limits.min_accuracy is not None and found is not None:
            missed["min_accuracy"] = limits.min_accuracy - found.scored.value
        if limits.max_latency_ms is not None:
            missed["max_latency_ms"] = max(c.latency.median for c in shown.cells) - limits.max_latency_ms
        if limits.max_memory_mb is not None:
            missed["max_memory_mb"] = (shown.peak_memory_bytes or 0) / 1e6 - limits.max_memory_mb
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
            speed=self.speed(tried),
            result=tried.final,
            **(compared.in_a_table() if compared is not None else {}),
            front=tried in finals and not self._dominated(tried, finals),
            winner=tried is winner,
            reason=self._why_not(tried, winner, finals),
        )

    def _dominated(self, tried: Tried, finals: Iterable[Tried]) -> bool:
        """Whether another one is at least as good in both speed and accuracy, and better in one."""
        mine = (self.speed(tried), _worth(tried))
        others = [(self.speed(other), _worth(other)) for other in finals]
        return any(o[0] >= mine[0] and o[1] >= mine[1] and o != mine for o in others)

    def _why_not(self, tried: Tried, winner: Tried, finals: Sequence[Tried]) -> str:
        speed = self.speed(tried)
        if tried is winner:
            return ""
        if tried.reason:
            return tried.reason
        if tried.found is None:
            # By the same short measurement: a survivor's last one may be lower than what was screened out.
            weakest = min(self._screened(t) for t in finals)
            return f"screened out: {speed:.2f} times PyTorch float32 in the screen, where the survivors had at least {weakest:.2f}"
        if missed := self.violations(tried):
            return "; ".join(f"misses {name} by {by:.4g}" for name, by in missed.items())
        if speed < (best := self.speed(winner)):
            return f"fits, but {speed:.2f} times PyTorch float32 is less than the winner's {best:.2f}"
        return "fits, and as good as the winner"


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
