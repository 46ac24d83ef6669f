"""The search behind `accel.tune`.

Candidates come from the backends' declared capabilities (`accel.candidates`). Latency screens are cheap and come first;
accuracy is measured on all rows, of the survivors only; those are timed again, longer. Building and evaluating happen in
processes of their own, so that a backend that crashes is one rejected candidate. Everything measured is kept under
`ACCEL_HOME/tune` by what it depends on, so that a second run starts where the first one stopped.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from . import benchmarking, capture, progress, registry, rounds, workloads
from .artifact import Artifact, RunRecord, staging
from .benchmarking import VariantResult
from .candidates import Candidate, Recipe, Space, combined
from .config import available_processors
from .doctor import machine
from .errors import AccelError, BudgetError, SessionError
from .hub import HubOptions
from .rounds import Measured
from .statistics import geometric_mean
from .tuning_jobs import Store, accuracy, build, data_digest, digest, opens, versions
from .tuning_report import Constraints as Constraints
from .tuning_report import Objective, Trial, no_fit
from .tuning_report import Tuning as Tuning
from .workers import Helper, Traffic, Variant, Worker, Workload

logger = logging.getLogger(__name__)

_HEAT = 6  # candidates that are loaded at once, beside PyTorch
_SCREEN = {"rounds": 4, "calls": 6, "budget_s": 15}  # the budget is for each workload
_FINAL = {"rounds": 12, "calls": 12, "budget_s": 45}
_WARMUP = 6
_VARIED = 3  # recipes whose run options are varied
_SURVIVORS = 5  # candidates whose accuracy is measured before it is asked whether one fits
_SEARCH_SHARE = 0.55  # of the time limit; the rest is for accuracy and the last measurement
_EPSILON = 1e-9
_PYTORCH = "PyTorch eager float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The calls to be timed, before anything is loaded."""

    batch: tuple[int, ...]
    sequence: tuple[int, ...]
    texts: tuple[str, ...] | None
    max_length: int | None
    threads: int | None
    seed: int

    def key(self) -> dict[str, Any]:
        """What identifies the calls."""
        values = asdict(self)
        values["texts"] = digest(self.texts) if self.texts is not None else None
        return values


@dataclass(slots=True)
class _Made:
    """An artifact of the search."""

    recipe: Recipe
    path: Path
    facts: dict[str, Any]


@dataclass(slots=True)
class _Tried:
    """A candidate of the search."""

    candidate: Candidate
    made: _Made
    screen: VariantResult | None = None
    anchor: VariantResult | None = None
    final: VariantResult | None = None
    final_anchor: VariantResult | None = None
    found: dict[str, Any] | None = None
    reason: str = ""


def _worth(found: Mapping[str, Any]) -> float:
    """Its metric, larger is better."""
    value = float(found["value"])
    return value if found["higher_is_better"] else -value


def _quintiles(result: VariantResult) -> list[float]:
    """The latency that a fifth of the calls stay below, of each workload."""
    found = []
    for cell in result.cells:
        ordered = sorted(t for block in cell.milliseconds for t in block)
        found.append(ordered[len(ordered) // 5])
    return found


class Search:
    """One search and what it has found so far."""

    def __init__(
        self, *, source: str, folder: Path, task: str, hub: HubOptions, data: dict[str, Any],
        calibration: dict[str, Any] | None, calibration_samples: int, objective: Objective, constraints: Constraints,
        work: Work, store: Store, deadline: float | None, end: float | None,
    ) -> None:  # fmt: skip
        self._source, self._folder, self._task, self._hub = source, folder, task, hub
        self._data, self._calibration = data, calibration
        self._calibration_samples = calibration_samples
        self._objective, self._constraints, self._work = objective, constraints, work
        self._store, self._deadline, self._end = store, deadline, end
        self._started = time.perf_counter()
        self._helpers = [Helper() for _ in range(min(2, available_processors()))]
        self._anchor: Measured | None = None
        self._workloads: list[Workload] = []
        self._made: dict[str, _Made | str] = {}
        self._tried: dict[str, _Tried] = {}
        self._failed: dict[str, tuple[Candidate | None, str]] = {}
        self._refusals: dict[tuple[str, str, str | None], str] = {}
        self._source_digest = capture.folder_digest(folder)
        facts = machine()
        self._machine = {key: facts[key] for key in ("platform", "processors", "processors_of_machine")}
        self._machine["devices"] = sorted(
            f"{spec.name}: {device} {device.name} {device.arch}"
            for spec in registry.describe_all()[0]
            for device in registry.probe(spec).devices
        )
        self._versions = versions()

    def close(self) -> None:
        """End every process."""
        for helper in self._helpers:
            helper.close()
        if self._anchor is not None:
            self._anchor.close()

    # The order of things

    def run(self, space: Space, target: Path) -> Tuning:
        """Search, and write the winner into `target`.

        Raises:
            BudgetError: No candidate fits.
        """
        reference = self._reference()
        exports = self._build(space.exports())
        if not exports:
            why = "\n".join(f"  {name}: {reason}" for name, (_, reason) in self._failed.items())
            raise BudgetError(f"Nothing could be exported for {self._task}.\n{why}", fix="run `accel doctor`.")
        first = [
            recipe
            for made in exports
            for recipe in (
                *space.optimizations(made.recipe, made.facts["dtype"]),
                *space.quantizations(made.recipe, made.facts["dtype"]),
            )
        ]
        made = [*exports, *self._build(first)]
        self._screen([c for m in made for c in space.candidates(m.recipe, m.facts["dtype"])])
        more = self._build(self._compositions(space))
        self._screen([c for m in more for c in space.candidates(m.recipe, m.facts["dtype"])])
        self._vary(space)
        self._survive(reference)
        return self._conclude(space, reference, target)

    def _late(self, limit: float | None = None) -> bool:
        limit = self._deadline if limit is None else limit
        return limit is not None and time.perf_counter() > limit

    def _compositions(self, space: Space) -> list[Recipe]:
        """The two best schemes of a format again, on the best optimized artifact of that format."""
        recipes = []
        for format in dict.fromkeys(t.made.recipe.format for t in self._ranked()):
            ranked = [t for t in self._ranked() if t.made.recipe.format == format]
            best = next((t.made for t in ranked if t.made.recipe.stage == "optimize"), None)
            done = [t.made.recipe for t in ranked if t.made.recipe.stage == "quantize"]
            if best is None:
                continue
            offered = {
                (recipe.backend, recipe.setting): recipe
                for recipe in space.quantizations(best.recipe, best.facts["dtype"])
            }
            top = list(dict.fromkeys((r.backend, r.setting) for r in done))[:2]
            recipes += [offered[key] for key in top if key in offered]
        return recipes

    def _vary(self, space: Space) -> None:
        """Change the run options of the best recipes one by one, then put together what helped."""
        bases = list({str(t.made.recipe): t for t in reversed(self._ranked())}.values())[::-1][:_VARIED]
        bases = [t for t in self._ranked() if t in bases]
        changes: dict[str, list[Candidate]] = {}
        for base in bases:
            facts = base.made.facts
            offered = space.variations(
                base.candidate, dtype=facts["dtype"], lengths=self._lengths(facts), masked=facts["masked"]
            )
            changes[str(base.candidate)] = offered
        self._screen([c for offered in changes.values() for c in offered])
        together = []
        for base in bases:
            helped = [
                tried
                for c in changes[str(base.candidate)]
                if (tried := self._tried.get(str(c))) is not None and self._speed(tried) > 1.01 * self._speed(base)
            ]
            if len(helped) > 1:
                together.append(combined([t.candidate for t in sorted(helped, key=self._speed)]))
        self._screen(together)

    def _survive(self, reference: Mapping[str, Any]) -> None:
        """Measure the accuracy of the best, a few at a time, until one fits; then time those again, longer."""
        ranked = [t for t in self._ranked() if not self._cheap_violation(t)]
        for t in self._ranked():
            t.reason = self._cheap_violation(t) or t.reason
        measured: list[_Tried] = []
        for i in range(0, len(ranked), _SURVIVORS):
            part = ranked[i : i + _SURVIVORS]
            for tried in progress.track(part, "measuring accuracy"):
                if self._late(self._end) and any(t.found is not None and not self._violations(t) for t in part):
                    tried.reason = "its accuracy was not measured: the time limit was near"
                else:
                    self._accuracy(tried, reference)
            measured += [t for t in part if t.found is not None]
            if any(not self._violations(t) for t in measured):
                break
        self._time(measured, "final", _FINAL)

    # Building

    def _build(self, recipes: Sequence[Recipe]) -> list[_Made]:
        """Make artifacts, two at a time; a recipe that fails is a rejected candidate."""
        waiting = [recipe for recipe in recipes if str(recipe) not in self._made and str(recipe) not in self._failed]
        jobs = []
        for recipe in waiting:
            if self._late() and self._store.get("builds", self._key(recipe)) is None:
                self._failed[str(recipe)] = (None, "not tried: the time limit was near")
            else:
                jobs.append(recipe)
        free = list(self._helpers)

        def work(recipe: Recipe) -> tuple[Recipe, dict[str, Any] | str]:
            helper = free.pop()
            try:
                return recipe, self._build_one(helper, recipe)
            finally:
                free.append(helper)

        pool = ThreadPoolExecutor(len(free))
        try:
            for recipe, facts in progress.track(pool.map(work, jobs), "building", len(jobs)):
                if isinstance(facts, str):
                    self._failed[str(recipe)] = (None, facts)
                    logger.info("%s: %s", recipe, facts)
                else:
                    self._made[str(recipe)] = _Made(recipe, self._store.artifact(self._key(recipe)), facts)
        except BaseException:
            # Ctrl-C: nobody waits for builds that take another half minute.
            pool.shutdown(wait=False, cancel_futures=True)
            for helper in self._helpers:
                helper.kill()
            raise
        finally:
            pool.shutdown()
        return [made for r in recipes if isinstance(made := self._made.get(str(r)), _Made)]

    def _key(self, recipe: Recipe) -> dict[str, Any]:
        calibration = None
        if self._calibration is not None and recipe.stage == "quantize":
            calibration = {**self._calibration, "data": data_digest(self._calibration["data"])}
        key: dict[str, Any] = {
            "source": self._source_digest,
            "task": self._task,
            "recipe": recipe.to_dict(),
            "calibration": calibration,
            "samples": self._calibration_samples if calibration else None,
            "versions": self._versions,
        }
        return key

    def _build_one(self, helper: Helper, recipe: Recipe, *, files: bool = False) -> dict[str, Any] | str:
        """What is known about an artifact, or why there is none; `files`: and its folder, made again where it is gone."""
        key = self._key(recipe)
        out = self._store.artifact(key)
        known = self._store.get("builds", key)
        if known is not None and "error" in known:
            return str(known["error"])
        if known is not None and (not files or (out / "accel.json").is_file()):
            return known
        parent = None
        if recipe.parent is not None:
            if isinstance(problem := self._build_one(helper, recipe.parent, files=True), str):
                return problem
            parent = self._store.artifact(self._key(recipe.parent))
        step = recipe.to_dict()
        if recipe.stage == "quantize":
            step["settings"] = {"samples": self._calibration_samples, **step["settings"]}
        hub = {
            "revision": self._hub.revision,
            "token": self._hub.token,
            "trust_remote_code": self._hub.trust_remote_code,
        }
        logger.info("building %s", recipe)
        try:
            facts: dict[str, Any] = helper.call(
                build, step, parent, out, self._source, self._task, self._calibration, hub
            )
        except SessionError as error:
            return f"building it failed: {error.message.splitlines()[0]}"
        except AccelError as error:
            why = f"building it failed: {error.message.splitlines()[0]}"
            self._store.put("builds", key, {"error": why})
            return why
        self._store.put("builds", key, facts)
        return facts

    def _files(self, made: _Made) -> None:
        """Make the folder of a known artifact again where an earlier run removed it."""
        facts = self._build_one(self._helpers[0], made.recipe, files=True)
        if isinstance(facts, str):
            raise SessionError(facts)

    # Timing

    def _screen(self, candidates: Sequence[Candidate]) -> None:
        """Short measurements of candidates that are new; the same artifact made in two ways is measured once."""
        seen = {self._identity(t): str(t.candidate) for t in self._tried.values()}
        fresh = []
        for candidate in candidates:
            made = self._made[str(candidate.recipe)]
            assert isinstance(made, _Made)
            tried = _Tried(candidate, made)
            word = candidate.options.compute_dtype
            if str(candidate) in self._tried or str(candidate) in self._failed:
                continue
            if word is not None and (refusal := self._refusal(candidate, made)):
                self._failed[str(candidate)] = (candidate, refusal)
            elif self._identity(tried) in seen:
                self._failed[str(candidate)] = (
                    candidate,
                    f"the same files and options as {seen[self._identity(tried)]}",
                )
            else:
                seen[self._identity(tried)] = str(candidate)
                fresh.append(tried)
        self._time(fresh, "screen", _SCREEN)
        for tried in fresh:
            if tried.screen is not None and tried.screen.error is None:
                self._tried[str(tried.candidate)] = tried
                logger.info("%s: %.2f times PyTorch float32", tried.candidate, self._speed(tried))
            else:
                why = tried.reason or (tried.screen.error if tried.screen else None) or "it was not measured"
                self._failed[str(tried.candidate)] = (tried.candidate, why.splitlines()[0])
                logger.info("%s: %s", tried.candidate, why.splitlines()[0])

    def _refusal(self, candidate: Candidate, made: _Made) -> str:
        """Why a backend does not compute in another dtype; asked once, in a helper that is warm."""
        where = (candidate.backend, candidate.device, candidate.options.compute_dtype)
        if where not in self._refusals:
            key = {
                "opens": list(where),
                "format": made.recipe.format,
                "versions": self._versions,
                "machine": self._machine,
            }
            known = self._store.get("opens", key)
            if known is None:
                self._files(made)
                try:
                    self._helpers[0].call(
                        opens, made.path, candidate.backend, candidate.device, candidate.options.to_dict()
                    )
                    known = {"refusal": ""}
                except AccelError as error:
                    known = {"refusal": error.message.splitlines()[0]}
                self._store.put("opens", key, known)
            self._refusals[where] = str(known["refusal"])
        return self._refusals[where]

    @staticmethod
    def _identity(tried: _Tried) -> str:
        c = tried.candidate
        return json.dumps([tried.made.facts["digest"], c.backend, c.device, c.options.to_dict()], default=str)

    def _time_key(self, tried: _Tried, kind: str, amount: Mapping[str, int]) -> dict[str, Any]:
        return {
            "what": self._identity(tried),
            "kind": kind,
            "amount": dict(amount),
            "work": self._work.key(),
            "callers": self._traffic().callers,
            "machine": self._machine,
            "versions": self._versions,
            "source": self._source_digest,
        }

    def _time(self, group: Sequence[_Tried], kind: Literal["screen", "final"], amount: Mapping[str, int]) -> None:
        """Measure a few at a time beside PyTorch float32, unless it was done before."""
        waiting = []
        for tried in group:
            known = self._store.get(f"{kind}s", self._time_key(tried, kind, amount))
            if known is None:
                waiting.append(tried)
            else:
                self._assign(tried, kind, known)
        for i in range(0, len(waiting), _HEAT):
            heat = waiting[i : i + _HEAT]
            if kind == "screen" and self._late():
                for tried in heat:
                    tried.reason = "not tried: the time limit was near"
                continue
            for tried in heat:
                self._files(tried.made)
            anchor, results = self._heat([self._variant(t) for t in heat], amount, f"{kind}ing")
            for tried, found in zip(heat, results, strict=True):
                record = {"result": asdict(found), "anchor": asdict(anchor)}
                if found.error is None or "Error: " in found.error:
                    self._store.put(f"{kind}s", self._time_key(tried, kind, amount), record)
                self._assign(tried, kind, record)

    @staticmethod
    def _assign(tried: _Tried, kind: str, record: Mapping[str, Any]) -> None:
        found, anchor = (VariantResult.from_dict(record[name]) for name in ("result", "anchor"))
        if kind == "screen":
            tried.screen, tried.anchor = found, anchor
        elif found.error is None:
            tried.final, tried.final_anchor = found, anchor
        else:
            tried.reason = found.error

    def _variant(self, tried: _Tried) -> Variant:
        c = tried.candidate
        return Variant(
            name=str(c), path=tried.made.path, task=self._task, backend=c.backend, device=c.device, options=c.options,
            trust_remote_code=self._hub.trust_remote_code,
        )  # fmt: skip

    def _traffic(self) -> Traffic:
        return Traffic(callers=available_processors() if self._objective == "throughput" else 1)

    def _heat(
        self, variants: Sequence[Variant], amount: Mapping[str, int], what: str
    ) -> tuple[VariantResult, list[VariantResult]]:
        anchor = self._start_anchor()
        anchor.blocks = {}
        group = [anchor, *(Measured(v, Worker(v, self._work.threads)) for v in variants)]
        try:
            for one in progress.track(group[1:], "loading"):
                one.loaded = one.attempt(lambda worker: worker.load())
            for workload in self._workloads:
                rounds.warm_up(group, workload, _WARMUP)
                rounds.check(group, workload, None, judge=False)
                rounds.take_turns(
                    group, workload, rounds=amount["rounds"], calls=amount["calls"], budget_s=amount["budget_s"],
                    traffic=self._traffic(), what=what,
                )  # fmt: skip
            for one in group:
                one.peak_memory = one.attempt(lambda worker: worker.peak_memory())
            results = [benchmarking.result(one, anchor, self._workloads) for one in group]
        finally:
            for one in group[1:]:
                one.close()
        if anchor.error is not None:
            raise SessionError(f"PyTorch failed: {anchor.error}", fix="run `accel benchmark MODEL` to see why.")
        return results[0], results[1:]

    def _start_anchor(self) -> Measured:
        """PyTorch float32, kept loaded for all heats, and the workloads, whose inputs it makes."""
        if self._anchor is not None:
            return self._anchor
        variant = Variant(
            name=_PYTORCH, path=self._folder, task=self._task, pytorch="float32",
            trust_remote_code=self._hub.trust_remote_code,
        )  # fmt: skip
        anchor = self._anchor = Measured(variant, Worker(variant, self._work.threads))
        anchor.loaded = anchor.attempt(lambda worker: worker.load())
        if anchor.worker is None or anchor.loaded is None:
            raise SessionError(f"PyTorch failed: {anchor.error}", fix="run `accel benchmark MODEL` to see why.")
        if self._work.texts is None:
            self._workloads = workloads.grid(anchor.worker, anchor.loaded, self._work.batch, self._work.sequence)
        else:
            self._workloads = self._text_workloads(anchor.loaded.limits)
        return anchor

    def _text_workloads(self, limits: Mapping[str, int]) -> list[Workload]:
        assert self._work.texts is not None
        return [
            workloads.of_texts(
                self._work.texts, self._folder, name=f"{size} texts", task=self._task, batch=size, tokenize=False,
                max_length=self._work.max_length or limits.get("sequence"), seed=self._work.seed,
            )
            for size in self._work.batch
        ]  # fmt: skip

    def _lengths(self, facts: Mapping[str, Any]) -> Iterator[int]:
        """Lengths that the workloads' calls have."""
        if self._work.texts is None:
            yield from self._work.sequence
            return
        for workload in self._text_workloads(facts["limits"]):
            yield from (case["input_ids"].shape[1] for case in workload.cases)

    # Judging

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

    def _speed(self, tried: _Tried) -> float:
        """The objective relative to PyTorch float32, by the last measurement.

        A screen is short, and another program's work can hit PyTorch in one heat and not in the next: latencies of screens
        are compared by their lower quintile, with PyTorch's over all heats.
        """
        if tried.final is not None and tried.final_anchor is not None:
            return self._score(tried.final, tried.final_anchor)
        assert tried.screen is not None
        assert tried.anchor is not None
        if self._objective != "latency":
            return self._score(tried.screen, tried.anchor)
        anchors = [_quintiles(t.anchor) for t in self._tried.values() if t.anchor is not None] or [
            _quintiles(tried.anchor)
        ]
        base = [sorted(cell)[len(cell) // 2] for cell in zip(*anchors, strict=True)]
        return geometric_mean([a / b for a, b in zip(base, _quintiles(tried.screen), strict=True)])

    def _ranked(self) -> list[_Tried]:
        return sorted(self._tried.values(), key=lambda t: -self._speed(t))

    def _reference(self) -> dict[str, Any]:
        """PyTorch float32 on the data."""
        model = {
            "pytorch": str(self._folder),
            "task": self._task,
            "trust_remote_code": self._hub.trust_remote_code,
        }
        key = {"model": self._source_digest, "task": self._task, "data": self._data_key(), "versions": self._versions}
        known = self._store.get("accuracy", key)
        if known is None:
            progress.report("measuring the accuracy of PyTorch float32", 0, 1)
            known = self._helpers[0].call(accuracy, model, self._data, None)
            self._store.put("accuracy", key, known)
        logger.info("%s: %s %.4f on %d rows", _PYTORCH, known["metric"], known["value"], known["rows"])
        return known

    def _data_key(self) -> dict[str, Any]:
        return {**self._data, "data": data_digest(self._data["data"])}

    def _accuracy(self, tried: _Tried, reference: Mapping[str, Any]) -> None:
        c = tried.candidate
        key = {"what": self._identity(tried), "data": self._data_key(), "source": self._source_digest,
               "machine": self._machine, "versions": self._versions}  # fmt: skip
        known = self._store.get("accuracy", key)
        if known is None:
            model = {
                "path": str(tried.made.path), "backend": c.backend, "device": c.device, "options": c.options.to_dict(),
                "task": self._task, "trust_remote_code": self._hub.trust_remote_code,
            }  # fmt: skip
            try:
                self._files(tried.made)
                known = self._helpers[0].call(accuracy, model, self._data, list(reference["predictions"]))
            except AccelError as error:
                tried.reason = f"measuring its accuracy failed: {error.message.splitlines()[0]}"
                logger.info("%s: %s", c, tried.reason)
                return
            self._store.put("accuracy", key, known)
        tried.found = known
        logger.info("%s: loses %.2f points on %d rows", c, known["drop"], known["rows"])

    def _cheap_violation(self, tried: _Tried) -> str:
        """Why a candidate cannot win, as far as the screen tells."""
        limits, screen = self._constraints, tried.screen
        assert screen is not None
        size, memory = tried.made.facts["bytes"] / 1e6, (screen.peak_memory_bytes or 0) / 1e6
        if limits.max_size_mb is not None and size > limits.max_size_mb:
            return f"{size:.1f} MB of files; accepted: {limits.max_size_mb:g}"
        if limits.max_memory_mb is not None and memory > limits.max_memory_mb:
            return f"{memory:.0f} MB of memory; accepted: {limits.max_memory_mb:g}"
        worst = max(cell.latency.median for cell in screen.cells)
        # A screen is short: only what is far above is out.
        if limits.max_latency_ms is not None and worst > 1.5 * limits.max_latency_ms:
            return f"median {worst:.2f} ms in the screen; accepted: {limits.max_latency_ms:g}"
        return ""

    def _violations(self, tried: _Tried) -> dict[str, float]:
        """By how much a candidate misses each constraint."""
        limits, missed = self._constraints, {}
        shown = tried.final or tried.screen
        assert shown is not None
        found = tried.found or {}
        if limits.max_drop is not None and "drop" in found:
            missed["max_drop"] = found["drop"] - limits.max_drop
        if limits.min_accuracy is not None and "value" in found:
            missed["min_accuracy"] = limits.min_accuracy - found["value"]
        if limits.max_latency_ms is not None:
            missed["max_latency_ms"] = max(c.latency.median for c in shown.cells) - limits.max_latency_ms
        if limits.max_memory_mb is not None:
            missed["max_memory_mb"] = (shown.peak_memory_bytes or 0) / 1e6 - limits.max_memory_mb
        if limits.max_size_mb is not None:
            missed["max_size_mb"] = tried.made.facts["bytes"] / 1e6 - limits.max_size_mb
        return {name: by for name, by in missed.items() if by > _EPSILON}

    # The end

    def _conclude(self, space: Space, reference: Mapping[str, Any], target: Path) -> Tuning:
        ranked = self._ranked()
        finals = [t for t in ranked if t.final is not None and t.found is not None]
        fits = [t for t in finals if not self._violations(t)]
        if not fits:
            raise no_fit(
                [(str(t.candidate), self._violations(t), t.found is not None) for t in ranked],
                asdict(self._constraints),
            )
        winner = fits[0]
        assert winner.final is not None
        assert winner.final_anchor is not None
        trials = self._trials(space, ranked, finals, winner)
        kept = next(trial for trial in trials if trial.winner)
        facts = machine()
        del facts["home"], facts["executable"]
        settings = {**self._work.key(), "threads": self._work.threads or available_processors(),
                    "callers": self._traffic().callers, "rounds": _FINAL["rounds"], "calls": _FINAL["calls"]}  # fmt: skip
        made = Tuning(
            artifact=self._winner_artifact(winner),
            winner=kept,
            trials=tuple(trials),
            task=self._task,
            metric=reference["metric"],
            rows=reference["rows"],
            reference=reference["value"],
            baseline=winner.final_anchor,
            objective=self._objective,
            constraints=self._constraints,
            machine=facts,
            settings=settings,
            seconds=round(time.perf_counter() - self._started, 1),
            resumed=self._store.hits,
        )
        artifact = self._write(winner, made, target)
        self._tidy({str(t.made.path) for t in finals})
        return replace(made, artifact=artifact)

    def _winner_artifact(self, winner: _Tried) -> Artifact:
        self._files(winner.made)
        return Artifact.load(winner.made.path)

    def _trials(self, space: Space, ranked: Sequence[_Tried], finals: Sequence[_Tried], winner: _Tried) -> list[Trial]:
        """Every candidate, and why it is not the winner."""
        made = []
        best = self._speed(winner)
        weakest = min(self._speed(t) for t in finals)
        for tried in ranked:
            found = tried.found or {}
            front = tried in finals and not any(
                other.found is not None
                and self._speed(other) >= self._speed(tried)
                and _worth(other.found) >= _worth(found)
                and (self._speed(other), _worth(other.found)) != (self._speed(tried), _worth(found))
                for other in finals
            )
            missed = self._violations(tried)
            speed = self._speed(tried)
            if tried is winner:
                reason = ""
            elif tried.reason:
                reason = tried.reason
            elif tried.found is None:
                reason = (
                    f"screened out: {speed:.2f} times PyTorch float32, and the survivors have at least {weakest:.2f}"
                )
            elif missed:
                reason = "; ".join(f"misses {name} by {by:.4g}" for name, by in missed.items())
            elif speed < best:
                reason = f"fits, but {speed:.2f} times PyTorch float32 is less than the winner's {best:.2f}"
            else:
                reason = "fits, and as good as the winner"
            facts, options = tried.made.facts, (tried.final or tried.screen)
            made.append(
                Trial(
                    name=str(tried.candidate),
                    backend=tried.candidate.backend,
                    device=tried.candidate.device,
                    options=options.options if options is not None else {},
                    digest=facts["digest"],
                    bytes=facts["bytes"],
                    speed=speed,
                    result=tried.final,
                    value=found.get("value"),
                    drop=found.get("drop"),
                    drop_interval=tuple(found["drop_interval"]) if "drop_interval" in found else None,
                    agreement=found.get("agreement"),
                    front=front,
                    winner=tried is winner,
                    reason=reason,
                )
            )
        for name, (candidate, reason) in self._failed.items():
            backend, device = (candidate.backend, candidate.device) if candidate else ("", "")
            made.append(Trial(name=name, backend=backend, device=device, reason=reason))
        made += [Trial(name=skipped.name, backend="", device="", reason=skipped.reason) for skipped in space.skipped]
        return made

    def _write(self, winner: _Tried, tuning: Tuning, target: Path) -> Artifact:
        """The winning artifact with its run options, so that loading it runs what was measured."""
        assert winner.final is not None
        assert winner.final_anchor is not None
        assert winner.found is not None
        candidate = winner.candidate
        options = {**winner.final.options}
        run = RunRecord(
            backend=candidate.backend,
            device=candidate.device,
            session=options,
            measured={
                "metric": tuning.metric,
                "value": winner.found["value"],
                "pytorch_float32": tuning.reference,
                "drop": winner.found["drop"],
                "rows": winner.found["rows"],
                "data": winner.found["data"],
                "median_ms": {c.workload: round(c.latency.median, 4) for c in winner.final.cells},
                "pytorch_float32_ms": {c.workload: round(c.latency.median, 4) for c in winner.final_anchor.cells},
                "peak_memory_bytes": winner.final.peak_memory_bytes,
                "objective": tuning.objective,
            },
        )
        source = tuning.artifact
        with staging(target) as folder:
            shutil.copytree(source.path, folder, dirs_exist_ok=True)
            made = Artifact.create(folder, replace(source.manifest, run=run))
            values = replace(tuning, artifact=Artifact(target, made.manifest)).to_dict()
            (folder / "tune.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        return Artifact(target, made.manifest)

    def _tidy(self, survivors: set[str]) -> None:
        """Remove the files of candidates that lost; what was measured about them stays."""
        for made in self._made.values():
            if isinstance(made, _Made) and made.recipe.stage != "export" and str(made.path) not in survivors:
                shutil.rmtree(made.path, ignore_errors=True)
