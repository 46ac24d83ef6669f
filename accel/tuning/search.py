"""The search for the best artifact and the best way to run it: one loop that builds and measures the proposals of a preset.

A preset is a generator. It yields a `Proposal`, receives the built or measured results, uses them to make its next proposal, and
finally returns its conclusion. The presets belong to `accel.tune` (`tune_proposals`), to the accuracy budget of `accel.quantize`, and
to `accel.convert`. Presets choose the candidates, the goal and when to stop; only `Search` builds, times and measures accuracy.

Candidates are built and measured in separate processes, so that the crash of a backend rejects only one candidate. All results are
stored in `ACCEL_HOME/tune`, under a digest of everything that they depend on, so that a second run reuses the results of the first.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ..config import available_processors
from ..errors import BudgetError, SessionError
from ..interfaces.protocols import Feeds
from ..measuring.accuracy.evaluation import EvaluationData, EvaluationSet
from ..measuring.disturbance import MachineWatch
from ..measuring.latency.workloads import WorkloadSettings
from .builder import ArtifactBuilder
from .candidates import Candidate, Recipe
from .grader import AccuracyGrader
from .jobs import CalibrationData
from .objective import CandidateComparison
from .search_data import BuiltArtifact, SearchSubject, TimeBudget, TriedCandidate
from .store import ResultStore
from .timer import CandidateTimer
from .trials import Goal

logger = logging.getLogger(__name__)

Conclusion = TypeVar("Conclusion")

# Time reserved to measure the accuracy of the best candidates: seconds to load a model, and a multiple of the time that the
# baseline's accuracy took.
_LOAD_S, _TIMES = 5.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Request of a preset: the next items to build or measure. `Search.run` sends the results back to the preset.

    Attributes:
        stage: Name of the stage to which the time is added.
        action: The work to do with the items. `build`: build recipes; returns a `BuiltArtifact` for each success. `screen`: time
            new candidates briefly; returns a `TriedCandidate` for each candidate that ran. `accuracy`: measure the accuracy of
            the items; returns the items with a result. `time`: time several items and the baseline in the same rounds; returns
            the items. `alone`: the same for one item.
        items: Recipes (`build`), candidates (`screen`) or `TriedCandidate`s (all other actions).
        share: Fraction of the time limit after which the remaining work is skipped.
    """

    stage: str
    action: Literal["build", "screen", "accuracy", "time", "alone"]
    items: Sequence[Any]
    share: float = 1.0


Preset = Generator[Proposal, list[Any], Conclusion]


class Search:
    """A search and its results so far.

    Args:
        subject: The model to search for.
        data: Labelled rows to measure accuracy on; `None` for presets that measure no accuracy.
        calibration: Rows or batches for schemes that need activation ranges.
        goal: The objective and the constraints.
        load: The calls to time.
        store: Store with the results of earlier searches.
        clock: The time limit.
        watch: Machine watch that was created before accel started to work; `None` to create one now.
        processes: Number of processes that build and measure at the same time; 0 to do both in this process.

    Attributes:
        builder, grader, timer, judge: The parts that build, measure accuracy, time and compare.
        failed: Candidates that could not be timed, with the reasons, by name.
        stages: Duration of each stage, in seconds.
    """

    def __init__(
        self, *, subject: SearchSubject, data: EvaluationData | EvaluationSet | None,
        calibration: CalibrationData | Iterable[Feeds] | None, goal: Goal, load: WorkloadSettings, store: ResultStore, clock: TimeBudget,
        watch: MachineWatch | None = None, processes: int = 2,
    ) -> None:  # fmt: skip
        self.subject, self.goal, self.load, self.store, self.clock = subject, goal, load, store, clock
        self.builder = ArtifactBuilder(subject, store, clock, calibration=calibration, processes=processes)
        callers = available_processors() if goal.objective == "throughput" else 1
        self.timer = CandidateTimer(subject, load, store, clock, self.builder, callers=callers, watch=watch)
        self.grader = AccuracyGrader(subject, data, store, self.builder, load)
        self.judge = CandidateComparison(goal)
        self.failed: dict[str, tuple[Candidate | None, str]] = {}
        self.stages: dict[str, float] = {}
        self._baseline_missing = data is not None

    def close(self) -> None:
        """End all processes of the search."""
        self.builder.close()
        self.timer.close()

    def fits(self, tried: TriedCandidate) -> bool:
        """Return whether a candidate meets all constraints."""
        return not self.judge.violations(tried)

    def run(self, preset: Preset[Conclusion]) -> Conclusion:
        """Build and measure the proposals of a preset until the preset ends; return its conclusion.

        Raises:
            BudgetError: The time limit ended before the baseline was measured, or the preset raised this error.
        """
        if self._baseline_missing:
            self.grader.begin()
        results: Any = None
        while True:
            try:
                proposal = preset.send(results)
            except StopIteration as end:
                conclusion: Conclusion = end.value
                return conclusion
            started = time.perf_counter()
            results = self._measure(proposal.action, proposal.items, proposal.share)
            seconds = time.perf_counter() - started
            self.stages[proposal.stage] = round(self.stages.get(proposal.stage, 0.0) + seconds, 1)
            logger.info("%s: %.1f s", proposal.stage, seconds)

    def _measure(self, action: str, items: Sequence[Any], share: float) -> list[Any]:
        if action == "build":
            return self._build(items, share)
        if action == "screen":
            return self._screen(items, share)
        if action == "accuracy":
            return self._grade(items, share)
        self.timer.finals(items, alone=action == "alone")
        return list(items)

    def _build(self, recipes: Sequence[Recipe], share: float) -> list[BuiltArtifact]:
        begun = self.builder.begin(recipes, share)
        if self._baseline_missing:
            # Measure the baseline before waiting for builds, so that unusable data is reported within seconds.
            self._measure_baseline()
        return self.builder.finish(begun)

    def _measure_baseline(self) -> None:
        try:
            seconds = self.grader.reference().scored.seconds
        except SessionError as error:
            if self.clock.left() > 0:
                raise
            raise BudgetError(
                f"The time limit of {self.clock.limit_s:g} s ended before the accuracy of the PyTorch float32 model was measured.",
                fix="use a longer time limit (--time-limit), or fewer rows (--samples).",
            ) from error
        self._baseline_missing = False
        # Reserve time to measure accuracy, because timings without accuracy are useless.
        self.clock.keep(_LOAD_S + _TIMES * len(self.grader.batch_sizes) * seconds)

    def _screen(self, candidates: Sequence[Candidate], share: float) -> list[TriedCandidate]:
        """Time new candidates briefly. If several candidates run the same files in the same way, time only the simplest."""
        same = {t.identity: str(t.candidate) for t in self.judge.tried.values()}
        fresh: dict[str, TriedCandidate] = {}
        for candidate in sorted(candidates, key=lambda c: c.complexity):
            name, tried = str(candidate), TriedCandidate(candidate, self.builder[candidate.recipe])
            if name in self.judge.tried or name in self.failed or name in fresh:
                continue
            if (twin := same.setdefault(tried.identity, name)) != name:
                self.failed[name] = (candidate, f"it has the same files and options as {twin}")
            else:
                fresh[name] = tried
        group = list({name: fresh[name] for name in map(str, candidates) if name in fresh}.values())
        self.timer.screen(group, share, hopeless=self.goal.hopeless)
        timed = []
        for tried in group:
            name = str(tried.candidate)
            if tried.screen is not None and tried.screen.result.error is None:
                self.judge.tried[name] = tried
                timed.append(tried)
                logger.info("%s: %s times as good as PyTorch float32", name, self.judge.speedup(tried))
            else:
                error = tried.reason or (tried.screen.result.error if tried.screen else None) or "it was not measured"
                why = re.sub(r"^\w+Error: ", "", error.splitlines()[0].removeprefix(f"{name} failed: "))
                self.failed[name] = (tried.candidate, why)
                logger.info("%s: %s", name, why)
        return timed

    def _grade(self, group: Sequence[TriedCandidate], share: float) -> list[TriedCandidate]:
        """Measure accuracy. Near the end of the time limit, stop after the first candidate that meets the constraints."""
        graded: list[TriedCandidate] = []
        for tried in group:
            if self.clock.left(share) < self.grader.seconds and any(map(self.fits, graded)):
                tried.reason = "its accuracy was not measured, because the time limit was near"
                continue
            self.grader.grade(tried)
            if tried.accuracy is not None:
                self.judge.tried[str(tried.candidate)] = tried
                graded.append(tried)
        return graded
