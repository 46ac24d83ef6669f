"""The search for the best artifact and the way to run it, inside constraints; `tune`, the accuracy budget of `quantize` and `convert`
are presets of it.

A search builds recipes, times candidates, measures their accuracy, and keeps the best that fits. `Search.run` holds the stages of
`tune` in order.

Candidates come from the backends' declared capabilities (`accel.tuning.candidates`). Latency screens are cheap and come first;
accuracy is measured on all rows, of the survivors only; those are timed again, longer. Building and evaluating happen in
processes of their own, so that a backend that crashes is one rejected candidate. Everything measured is kept under
`ACCEL_HOME/tune` by what it depends on, so that a second run starts where the first one stopped.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from .. import progress
from ..artifact.json_text import json_text
from ..artifact.manifest import Artifact, RunRecord
from ..artifact.writing import staging
from ..backends.machine import machine
from ..backends.plan import RunSettings
from ..config import available_processors
from ..errors import AccelError, BudgetError, SessionError
from ..interfaces.protocols import Feeds
from ..measuring.accuracy.evaluation import EvaluationData, EvaluationSet
from ..measuring.disturbance import MachineWatch
from ..measuring.latency.results import without_infinity
from ..measuring.latency.workloads import Load, check_sequences
from .builder import Builder
from .candidates import Candidate, Recipe, Space, combined
from .grader import Grader
from .jobs import CalibrationData, opens
from .objective import Judge
from .store import Store
from .subject import Clock, Made, Subject, Tried, load_key
from .timer import Timer
from .trials import Goal, Tuning, no_fit

logger = logging.getLogger(__name__)

_VARIED = 3  # recipes whose run options are varied
_SURVIVORS = 5  # candidates whose accuracy is measured before it is asked whether one fits
_HELPS = 1.01  # a run option that makes a candidate less than one percent faster does not

# Of the time that is left when a stage begins. Nothing goes without exports; what is left after accuracy belongs to the last
# measurement.
_EXPORT, _REWRITE, _SCREEN, _COMPOSE, _VARY, _GRADE = 0.6, 0.35, 0.4, 0.2, 0.3, 0.6
# Kept back for the accuracy of the best: seconds to load what computes it, and how many times as long as PyTorch's it may take.
_LOAD_S, _TIMES = 5.0, 2.0


def in_turns(group: Sequence[Tried]) -> list[Tried]:
    """Alternate between backends, the last candidates first: a time limit then drops plain exports, not the highest levels."""
    of: dict[str, list[Tried]] = {}
    for tried in reversed(group):
        of.setdefault(tried.candidate.backend, []).append(tried)
    return [tried for row in itertools.zip_longest(*of.values()) for tried in row if tried is not None]


class Search:
    """A search and its results so far.

    Args:
        subject: What is searched for.
        data: Labelled rows that accuracy is measured on.
        calibration: Rows or batches for schemes that need activation ranges.
        goal: What is best, and what a winner must satisfy.
        load: The calls to time.
        store: What earlier searches measured.
        clock: The time limit.
        watch: The machine since before anything of ours worked.
        processes: How many build and measure at a time; 0: this process does.

    Attributes:
        builder, grader, timer, judge: The parts that build, measure accuracy, time and compare.
    """

    def __init__(
        self, *, subject: Subject, data: EvaluationData | EvaluationSet, calibration: CalibrationData | Iterable[Feeds] | None,
        goal: Goal, load: Load, store: Store, clock: Clock, watch: MachineWatch | None = None, processes: int = 2,
    ) -> None:  # fmt: skip
        self._subject, self._goal, self._load, self._store, self._clock = subject, goal, load, store, clock
        self.builder = Builder(subject, store, clock, calibration=calibration, processes=processes)
        callers = available_processors() if goal.objective == "throughput" else 1
        self.timer = Timer(subject, load, store, clock, self.builder, callers=callers, watch=watch)
        self.grader = Grader(subject, data, store, self.builder, load)
        self.judge = Judge(goal)
        self._failed: dict[str, tuple[Candidate | None, str]] = {}
        self._refusals: dict[tuple[object, ...], str] = {}
        self._stages: dict[str, float] = {}

    def close(self) -> None:
        """End every process."""
        self.builder.close()
        self.timer.close()

    def attempt(self, recipe: Recipe, backend: str | None) -> Tried | None:
        """Build a recipe and measure its accuracy on a backend, its own choice when `None`; `None` where either failed."""
        made = self.builder.build([recipe], 1.0)
        if not made:
            return None
        tried = Tried(Candidate(recipe=recipe, backend=backend or "", device=""), made[0])
        self.grader.grade(tried)
        if tried.found is None:
            self.builder.failed[str(recipe)] = tried.reason
            return None
        self.judge.tried[str(tried.candidate)] = tried
        return tried

    def fits(self, tried: Tried) -> bool:
        """Whether a candidate satisfies all constraints."""
        return not self.judge.violations(tried)

    def run(self, space: Space, target: Path) -> Tuning:
        """Search, and write the winner into `target`.

        Raises:
            BudgetError: No candidate fits.
        """
        self.grader.begin()
        with self._stage("export"):
            begun = self.builder.begin(space.exports(), self._clock.until(_EXPORT))
            # Before the exports are waited for: data that cannot be used is found out in seconds.
            self._reference()
            # A search that knows how fast everything is and how accurate nothing is has found nothing.
            passes = _TIMES * len(self.grader.batch_sizes)
            self._clock.keep(_LOAD_S + passes * self.grader.reference().scored.seconds)
            exports = self.builder.finish(begun)
        if not exports:
            reasons = {**{one.name: one.reason for one in space.skipped}, **self.builder.failed}
            why = "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())
            raise BudgetError(f"Nothing could be exported for {self._subject.task}.\n{why}", fix="run `accel doctor`.")
        if self._load.texts is None:
            check_sequences(self._load.sequence, exports[0].facts.limits)
        with self._stage("optimize and quantize"):
            made = [*exports, *self.builder.build(self._rewrites(space, exports), self._clock.until(_REWRITE))]
        with self._stage("screen"):
            self._screen(self._runs(space, made), self._clock.until(_SCREEN), first=True)
        with self._stage("compose"):
            share = self._clock.until(_COMPOSE)
            more = self.builder.build(self._compositions(space), share)
            self._screen(self._runs(space, more), share)
        with self._stage("vary run options"):
            self._vary(space)
        with self._stage("measure accuracy"):
            self._clock.keep(0.0)
            survivors = self._survivors()
        with self._stage("time survivors"):
            self.timer.finals(survivors)
        return self._conclude(space, target)

    def _reference(self) -> None:
        try:
            self.grader.reference()
        except SessionError as error:
            if self._clock.left() > 0:
                raise
            raise BudgetError(
                f"The time limit of {self._clock.limit_s:g} s was over before PyTorch float32 was measured.",
                fix="allow more time (--time-limit), or fewer rows (--samples).",
            ) from error

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._stages[name] = round(time.perf_counter() - started, 1)
        logger.info("%s: %.1f s", name, self._stages[name])

    # What to try next

    @staticmethod
    def _rewrites(space: Space, exports: Sequence[Made]) -> list[Recipe]:
        """Optimizations and quantizations of the exports, alternating: a time limit drops some of each kind."""
        kinds = [
            offered
            for made in exports
            for offered in (
                space.quantizations(made.recipe, made.facts.dtype),
                space.optimizations(made.recipe, made.facts.dtype),
            )
        ]
        return [recipe for row in itertools.zip_longest(*kinds) for recipe in row if recipe is not None]

    @staticmethod
    def _runs(space: Space, made: Sequence[Made]) -> list[Candidate]:
        return [c for m in made for c in space.candidates(m.recipe, m.facts.dtype)]

    def _compositions(self, space: Space) -> list[Recipe]:
        """The two best schemes of a format again, on the best optimized artifact of that format."""
        recipes = []
        ranking = self.judge.ranked()
        for format in dict.fromkeys(t.made.recipe.format for t in ranking):
            ranked = [t for t in ranking if t.made.recipe.format == format]
            best = next((t.made for t in ranked if t.made.recipe.stage == "optimize"), None)
            done = [t.made.recipe for t in ranked if t.made.recipe.stage == "quantize"]
            if best is None:
                continue
            offered = space.quantizations(best.recipe, best.facts.dtype)
            top: dict[tuple[str, str], Recipe] = {}
            for recipe in done:
                top.setdefault((recipe.backend, recipe.setting), recipe)
            recipes += [
                other
                for recipe in list(top.values())[:2]
                for other in offered
                if replace(other, parent=None) == replace(recipe, parent=None)
            ]
        return recipes

    def _vary(self, space: Space) -> None:
        """Change the run options of the best recipes one by one, then combine the changes that helped."""
        bases, share = self._bases(), self._clock.until(_VARY)
        changes: dict[str, list[Candidate]] = {}
        for base in bases:
            facts = base.made.facts
            lengths = self.timer.lengths(facts.limits)
            changes[str(base.candidate)] = space.variations(
                base.candidate, dtype=facts.dtype, lengths=lengths, masked=facts.masked,
                threads=self._load.threads,
            )  # fmt: skip
        self._screen([c for offered in changes.values() for c in offered], share)
        together = []
        for base in bases:
            helped = [
                tried
                for c in changes[str(base.candidate)]
                if (tried := self.judge.tried.get(str(c))) is not None
                and self.judge.speed(tried) > _HELPS * self.judge.speed(base)
            ]
            if len(helped) > 1:
                together.append(combined([t.candidate for t in sorted(helped, key=self.judge.speed)]))
        self._screen(together, share)

    def _bases(self) -> list[Tried]:
        """The best recipes, and the best one of each backend that is not quantized.

        The latter lose less by another compute dtype than quantized ones lost already: they win when the budget is tight.
        """
        best: dict[str, Tried] = {}
        for tried in self.judge.ranked():
            best.setdefault(str(tried.made.recipe), tried)
        exact: dict[str, Tried] = {}
        for tried in best.values():
            if not tried.made.recipe.quantizes:
                exact.setdefault(tried.candidate.backend, tried)
        kept = [*list(best.values())[:_VARIED], *exact.values()]
        return [tried for tried in best.values() if tried in kept]

    # Measuring

    def _screen(self, candidates: Sequence[Candidate], share: float, *, first: bool = False) -> None:
        """Short measurements of candidates that are new; the same artifact made in two ways is measured once. The `first` ones
        are measured in another order than they come in, see `in_turns`.
        """
        seen = {t.identity: str(t.candidate) for t in self.judge.tried.values()}
        fresh = []
        for candidate in candidates:
            tried = Tried(candidate, self.builder[candidate.recipe])
            if str(candidate) in self.judge.tried or str(candidate) in self._failed:
                continue
            if refusal := self._refusal(tried):
                self._failed[str(candidate)] = (candidate, refusal)
            elif (twin := seen.get(tried.identity)) is not None:
                self._failed[str(candidate)] = (candidate, f"the same files and options as {twin}")
            else:
                seen[tried.identity] = str(candidate)
                fresh.append(tried)
        self.timer.screen(in_turns(fresh) if first else fresh, share, hopeless=self._hopeless())
        for tried in fresh:
            if tried.screen is not None and tried.screen.result.error is None:
                self.judge.tried[str(tried.candidate)] = tried
                logger.info("%s: %s times PyTorch float32", tried.candidate, self.judge.speedup(tried))
            else:
                why = tried.reason or (tried.screen.result.error if tried.screen else None) or "it was not measured"
                self._failed[str(tried.candidate)] = (tried.candidate, why.splitlines()[0])
                logger.info("%s: %s", tried.candidate, why.splitlines()[0])

    def _hopeless(self) -> float:
        """Return how many times slower than PyTorch a call may be before timing stops.

        Where rows a second or processor time count, one thread may win that is slower than all of them together; for size
        time does not matter, but what takes a hundred times as long helps nobody.
        """
        return {"latency": 3.0, "size": 100.0}.get(self._goal.objective, 3.0 * available_processors())

    def _refusal(self, tried: Tried) -> str:
        """Return why a backend refuses another dtype or its own option; each is tried once, in a running process."""
        c = tried.candidate
        if c.options.compute_dtype is None and not c.provider_options:
            return ""
        where = (c.backend, c.device, c.options.compute_dtype, *c.provider_options.items())
        if where not in self._refusals:
            key = {
                "opens": list(where),
                "format": tried.made.recipe.format,
                "versions": self._subject.versions,
                "machine": self._subject.machine,
            }
            known = self._store.get("opens", key)
            if known is None:
                self.builder.files(tried.made)
                try:
                    settings = RunSettings(
                        backend=c.backend,
                        device=c.device,
                        options=c.options,
                        provider_options=c.provider_options or None,
                    )
                    self.builder.call(opens, tried.made.path, settings)
                    known = {"refusal": ""}
                except AccelError as error:
                    known = {"refusal": error.message.splitlines()[0]}
                self._store.put("opens", key, known)
            self._refusals[where] = str(known["refusal"])
        return self._refusals[where]

    def _survivors(self) -> list[Tried]:
        """The accuracy of the best candidates, a few at a time, until one fits."""
        ranked = []
        for tried in self.judge.ranked():
            tried.reason = self.judge.cheap_violation(tried) or tried.reason
            if not tried.reason:
                ranked.append(tried)
        measured: list[Tried] = []
        share = self._clock.until(_GRADE)
        for i in range(0, len(ranked), _SURVIVORS):
            for tried in progress.track(ranked[i : i + _SURVIVORS], "measuring accuracy"):
                # The first ones are measured in any case, and more until one fits.
                if self._clock.left(share) < self.grader.seconds and any(map(self.fits, measured)):
                    tried.reason = "its accuracy was not measured: the time limit was near"
                    continue
                self.grader.grade(tried)
                if tried.found is not None:
                    measured.append(tried)
            if any(map(self.fits, measured)):
                break
        return measured

    # The end

    def _conclude(self, space: Space, target: Path) -> Tuning:
        finals = self.judge.finals()
        winner = self.judge.best([tried for tried in finals if self.fits(tried)])
        failed = {**{name: (None, why) for name, why in self.builder.failed.items()}, **self._failed}
        if winner is None:
            ranked = self.judge.ranked()
            missed = [(str(t.candidate), self.judge.violations(t), t.found is not None) for t in ranked]
            reasons = {name: why for name, (_, why) in failed.items()}
            raise no_fit(missed, asdict(self._goal.constraints), self._clock.limit_s, reasons)
        assert winner.final is not None
        trials = self.judge.trials(winner, failed, space)
        side_by_side = winner.final
        # Once more, alone next to the baseline: its own numbers everywhere.
        self.timer.finals([winner], alone=True)
        alone = winner.final is not side_by_side
        trials = [self.judge.measured_again(one, winner) if one.winner else one for one in trials]
        facts = machine()
        del facts["home"], facts["executable"]
        blocks = winner.last.result.cells[0].milliseconds
        settings = {**load_key(self._load), "threads": self._load.threads or available_processors(),
                    "callers": self.timer.traffic.callers, "rounds": len(blocks), "calls": len(blocks[0])}  # fmt: skip
        reference = self.grader.reference()
        self.builder.files(winner.made)
        made = Tuning(
            artifact=Artifact.load(winner.made.path),
            winner=next(trial for trial in trials if trial.winner),
            trials=tuple(trials),
            task=self._subject.task,
            metric=reference.metric,
            rows=reference.rows,
            total_rows=reference.data["total"],
            reference=reference.scored.value,
            baseline=winner.last.anchor,
            objective=self._goal.objective,
            constraints=self._goal.constraints,
            machine=facts,
            settings=settings,
            stages=self._stages,
            seconds=round(self._clock.spent(), 1),
            resumed=self._store.hits,
            batch_sizes=self.grader.batch_sizes,
            disturbance=self.judge.disturbance(winner),
            side_by_side=side_by_side.anchor if alone else None,
        )
        if made.disturbance.signs:
            logger.warning(
                "Other programs disturbed the search: %s. Search again with --fresh (fresh=True) when they have ended.",
                "; ".join(made.disturbance.signs),
            )
        artifact = _write(winner, made, target)
        self.builder.tidy({t.made.path for t in finals})
        return replace(made, artifact=artifact)


def _write(winner: Tried, tuning: Tuning, target: Path) -> Artifact:
    """Write the winning artifact with its run options, so that loading it runs it as measured."""
    found, result, speedup = winner.found, tuning.winner.result, tuning.winner.speedup
    assert result is not None
    assert speedup is not None
    assert found is not None
    assert found.comparison is not None
    run = RunRecord(
        backend=winner.candidate.backend,
        device=winner.candidate.device,
        session={**result.options},
        provider_options=dict(winner.candidate.provider_options),
        measured={
            "metric": tuning.metric,
            "value": found.scored.value,
            "pytorch_float32": tuning.reference,
            "drop": found.comparison.drop,
            "rows": found.rows,
            "data": found.data,
            "batch_size": found.batch_size,
            "by_length": tuning.settings.get("texts") is None,
            "by_batch": dict(found.by_batch),
            "median_ms": {c.workload: round(c.latency.median, 4) for c in result.cells},
            "pytorch_float32_ms": {c.workload: round(c.latency.median, 4) for c in tuning.baseline.cells},
            "speedup": without_infinity(asdict(speedup)),
            "disturbed": list(tuning.disturbance.signs),
            "peak_memory_bytes": result.peak_memory_bytes,
            "objective": tuning.objective,
        },
    )
    source = tuning.artifact
    with staging(target, needs=source.bytes) as folder:
        shutil.copytree(source.path, folder, dirs_exist_ok=True)
        made = Artifact.create(folder, replace(source.manifest, run=run))
        values = replace(tuning, artifact=Artifact(target, made.manifest)).to_dict()
        (folder / "tune.json").write_text(json_text(values, indent=1) + "\n", encoding="utf-8")
    return Artifact(target, made.manifest)
