"""Proposals of `accel.tune` to the search: all candidates that installed backends declare, and variations of the best ones.

Short timings are cheap and come first. Accuracy is measured on all rows, only for the best candidates (survivors). Survivors are then
timed again for longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from ..errors import BudgetError
from ..measuring.latency.workloads import check_sequences
from .candidates import Candidate, Recipe, SearchSpace, combined
from .search import Proposal, Search
from .search_data import BuiltArtifact, TriedCandidate

_VARIED = 3  # number of recipes whose run options are varied
_SURVIVORS = 5  # number of candidates whose accuracy is measured before checking whether one meets the constraints
_HELPS = 1.01  # minimum gain of a run option that is combined with others

# Fractions of the remaining time that each stage may use. The exports get the largest fraction, because all other stages need
# them. The last timing gets the time that remains after accuracy is measured.
_EXPORT, _REWRITE, _SCREEN, _COMPOSE, _VARY, _GRADE = 0.6, 0.35, 0.4, 0.2, 0.3, 0.6

Proposals = Generator[Proposal, list[Any], None]


def tune_proposals(search: Search, space: SearchSpace) -> Proposals:
    """Propose the candidates of `accel.tune` to the search, stage by stage.

    First come all exports and all optimized and quantized artifacts. The run options of the fastest candidates are then varied and
    combined. Finally the accuracy of the best candidates is measured, and they are timed for longer.

    Raises:
        BudgetError: Nothing could be exported.
    """
    until, runs = search.clock.until, space.candidates
    exports = yield Proposal(stage="export", action="build", items=space.exports(), share=until(_EXPORT))
    if not exports:
        reasons = {**{skipped.name: skipped.reason for skipped in space.skipped}, **search.builder.failed}
        why = "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())
        raise BudgetError(
            f"The search could not export the model (task {search.subject.task!r}) to any format:\n{why}",
            fix="run `accel doctor` to see what each backend requires.",
        )
    if search.load.texts is None:
        check_sequences(search.load.sequence, exports[0].facts.limits)
    built = yield Proposal(
        stage="optimize and quantize", action="build", items=_rewrites(space, exports), share=until(_REWRITE)
    )
    first = [c for m in (*exports, *built) for c in runs(m.recipe, m.facts.dtype)]
    yield Proposal(stage="screen", action="screen", items=in_turns(first), share=until(_SCREEN))
    share = until(_COMPOSE)
    built = yield Proposal(stage="compose", action="build", items=_compositions(search, space), share=share)
    more = [c for m in built for c in runs(m.recipe, m.facts.dtype)]
    yield Proposal(stage="compose", action="screen", items=more, share=share)
    yield from _vary(search, space)
    search.clock.keep(0.0)
    survivors = yield from _survivors(search)
    yield Proposal(stage="time survivors", action="time", items=survivors)


def in_turns(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Alternate between backends, starting with the last candidates, so that a time limit skips plain exports rather than high levels."""
    by_backend: dict[str, list[Candidate]] = {}
    for candidate in reversed(candidates):
        by_backend.setdefault(candidate.backend, []).append(candidate)
    return [c for row in itertools.zip_longest(*by_backend.values()) for c in row if c is not None]


def _rewrites(space: SearchSpace, exports: Sequence[BuiltArtifact]) -> list[Recipe]:
    """Return optimizations and quantizations of the exports, alternating, so that a time limit skips some of each kind."""
    kinds = [
        offers(built.recipe, built.facts.dtype)
        for built in exports
        for offers in (space.quantizations, space.optimizations)
    ]
    return [recipe for row in itertools.zip_longest(*kinds) for recipe in row if recipe is not None]


def _compositions(search: Search, space: SearchSpace) -> list[Recipe]:
    """Return, for each format, the two best quantization schemes applied to the best optimized artifact of that format."""
    recipes = []
    ranking = search.judge.ranked()
    for format in dict.fromkeys(t.artifact.recipe.format for t in ranking):
        ranked = [t.artifact for t in ranking if t.artifact.recipe.format == format]
        best = next((built for built in ranked if built.recipe.stage == "optimize"), None)
        if best is None:
            continue
        top: dict[tuple[str, str], Recipe] = {}
        for built in ranked:
            if built.recipe.stage == "quantize":
                top.setdefault((built.recipe.backend, built.recipe.setting), built.recipe)
        schemes = [replace(recipe, parent=None) for recipe in list(top.values())[:2]]
        offered = space.quantizations(best.recipe, best.facts.dtype)
        recipes += [recipe for scheme in schemes for recipe in offered if replace(recipe, parent=None) == scheme]
    return recipes


def _vary(search: Search, space: SearchSpace) -> Proposals:
    """Change the run options of the best recipes one by one, then combine the changes that made them faster."""
    judge, share = search.judge, search.clock.until(_VARY)
    changes: dict[str, list[Candidate]] = {}
    bases = _bases(search)
    for base in bases:
        facts = base.artifact.facts
        changes[str(base.candidate)] = space.variations(
            base.candidate, dtype=facts.dtype, lengths=search.timer.lengths(facts.limits), masked=facts.masked,
            threads=search.load.threads,
        )  # fmt: skip
    every = [candidate for varied in changes.values() for candidate in varied]
    yield Proposal(stage="vary run options", action="screen", items=every, share=share)
    together = []
    for base in bases:
        timed = [judge.tried[name] for name in map(str, changes[str(base.candidate)]) if name in judge.tried]
        helped = [tried for tried in timed if judge.speed(tried) > _HELPS * judge.speed(base)]
        if len(helped) > 1:
            together.append(combined([t.candidate for t in sorted(helped, key=judge.speed)]))
    yield Proposal(stage="vary run options", action="screen", items=together, share=share)


def _bases(search: Search) -> list[TriedCandidate]:
    """Return the candidates to vary: the best recipes, and the best recipe of each backend that is not quantized.

    Float candidates are included because another compute dtype costs less accuracy than quantization, so they win with a tight budget.
    """
    best: dict[str, TriedCandidate] = {}
    for tried in search.judge.ranked():
        best.setdefault(str(tried.artifact.recipe), tried)
    exact: dict[str, TriedCandidate] = {}
    for tried in best.values():
        if not tried.artifact.recipe.quantizes:
            exact.setdefault(tried.candidate.backend, tried)
    chosen = [*list(best.values())[:_VARIED], *exact.values()]
    return [tried for tried in best.values() if tried in chosen]


def _survivors(search: Search) -> Generator[Proposal, list[Any], list[TriedCandidate]]:
    """Measure the accuracy of the best candidates, a few at a time, until one meets the constraints; return all that were measured."""
    ranked = []
    for tried in search.judge.ranked():
        tried.reason = search.judge.cheap_violation(tried) or tried.reason
        if not tried.reason:
            ranked.append(tried)
    share, measured = search.clock.until(_GRADE), []
    for i in range(0, len(ranked), _SURVIVORS):
        measured += yield Proposal(
            stage="measure accuracy", action="accuracy", items=ranked[i : i + _SURVIVORS], share=share
        )
        if any(map(search.fits, measured)):
            break
    return measured
