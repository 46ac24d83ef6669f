"""Build each artifact of a search once, in other processes or in this one, and keep it for later searches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from .. import progress
from ..artifact.atomic_folder_writing import discard
from ..artifact.manifest import MANIFEST, Artifact
from ..config import available_processors
from ..errors import AccelError, ConfigError, SessionError, StageError, TaskError
from ..interfaces.protocols import Feeds
from ..measuring.processes import HelperProcess
from .candidates import Recipe
from .jobs import ArtifactFacts, CalibrationData, build, facts_of
from .search_data import BuiltArtifact, SearchSubject, TimeBudget
from .store import ResultStore, data_digest

logger = logging.getLogger(__name__)

LATE = "it was not tried, because the time limit was near"


class _SameThread(Executor):
    """Executor that runs each submitted call at once, in the calling thread."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **named))
        return future


class ArtifactBuilder:
    """Builds the artifacts of recipes. A recipe that cannot be built becomes a rejected candidate.

    Args:
        subject: The model to search for.
        store: Store with the artifacts of earlier searches.
        clock: The time limit.
        calibration: Rows for schemes that need activation ranges; or batches of inputs, with which results are not reused by later
            searches.
        processes: Number of processes that build at the same time. 0: build in this process, which is necessary if the calibration
            data or the model cannot be sent to another process.

    Attributes:
        failed: Reasons of failed builds, by recipe.
        errors: Errors raised in this search, by recipe.
    """

    def __init__(
        self,
        subject: SearchSubject,
        store: ResultStore,
        clock: TimeBudget,
        *,
        calibration: CalibrationData | Iterable[Feeds] | None = None,
        processes: int = 2,
    ) -> None:
        self._subject, self._store, self._clock = subject, store, clock
        self._calibration = calibration
        self._helpers = [HelperProcess() for _ in range(min(processes, available_processors()))]
        self._free: SimpleQueue[HelperProcess] = SimpleQueue()
        for helper in self._helpers:
            self._free.put(helper)
        self._pool: Executor = ThreadPoolExecutor(len(self._helpers)) if processes else _SameThread()
        self._turns: dict[str, threading.Lock] = {}
        self._built: dict[str, BuiltArtifact] = {}
        self._existing: dict[str, Artifact] = {}
        self.failed: dict[str, str] = {}
        self.errors: dict[str, AccelError] = {}

    def __getitem__(self, recipe: Recipe) -> BuiltArtifact:
        """Return the built artifact of a recipe."""
        return self._built[str(recipe)]

    def add(self, recipe: Recipe, artifact: Artifact) -> BuiltArtifact:
        """Register an existing artifact under a recipe, so that other recipes can start from it."""
        self._existing[str(recipe)] = artifact
        built = self._built[str(recipe)] = BuiltArtifact(recipe, artifact.path, facts_of(artifact))
        return built

    def close(self) -> None:
        """End all processes immediately, so that Ctrl-C does not wait for a build."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for helper in self._helpers:
            helper.end()
        self._pool.shutdown()
        for helper in self._helpers:
            helper.close()

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call `function(*args)` in the next free process; return a future. The caller's progress listener receives its progress."""
        return self._pool.submit(copy_context().run, self._ask, 1.0, function, *args)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)` in the next free process; wait for the result and return it."""
        return self.start(function, *args).result()

    def begin(self, recipes: Sequence[Recipe], share: float) -> list[tuple[Recipe, Future[ArtifactFacts | str]]]:
        """Start to build artifacts.

        Args:
            recipes: Recipes of the artifacts.
            share: Fraction of the time limit after which unfinished builds are stopped.
        """
        return [(recipe, self._pool.submit(self._facts_of, recipe, share)) for recipe in recipes]

    def finish(self, begun: Sequence[tuple[Recipe, Future[ArtifactFacts | str]]]) -> list[BuiltArtifact]:
        """Wait for the builds that `begin` started, and return the built artifacts. Reasons of failures are stored in `failed`."""
        # Without other processes, each build has already reported its progress.
        for recipe, future in progress.track(begun, "building artifacts") if self._helpers else begun:
            facts = future.result()
            if isinstance(facts, str):
                self.failed[str(recipe)] = facts
                logger.info("%s: %s", recipe, facts)
            else:
                self._built[str(recipe)] = BuiltArtifact(recipe, self._store.artifact(self._key(recipe)), facts)
        return [self._built[str(recipe)] for recipe, _ in begun if str(recipe) in self._built]

    def files(self, built: BuiltArtifact) -> None:
        """Build an artifact again if an earlier search removed its folder.

        Raises:
            SessionError: The artifact cannot be built any more.
        """
        if str(built.recipe) in self._existing:
            return
        facts = self._pool.submit(self._facts_of, built.recipe, 1.0, files=True).result()
        if isinstance(facts, str):
            raise SessionError(facts)

    def tidy(self, needed: set[Path]) -> None:
        """Remove the files of optimized and quantized artifacts that are not in `needed`. Exports and all measurements are kept."""
        rewrites = [built for built in self._built.values() if built.recipe.parent is not None]
        with self._store.alone() as alone:
            for built in rewrites if alone else ():
                if built.path not in needed:
                    discard(built.path)

    def _ask(self, share: float, function: Callable[..., Any], *args: Any) -> Any:
        if not self._helpers:
            return function(*args)
        helper = self._free.get()
        try:
            return helper.call(function, *args, timeout_s=self._clock.timeout(share))
        finally:
            self._free.put(helper)

    def _key(self, recipe: Recipe) -> dict[str, Any]:
        calibration = None
        if isinstance(self._calibration, CalibrationData) and recipe.quantizes:
            calibration = {**asdict(self._calibration), "data": data_digest(self._calibration.data)}
        return {
            "source": self._subject.digest,
            "task": self._subject.task,
            "recipe": asdict(recipe),
            "calibration": calibration,
            "versions": self._subject.versions,
        }

    def _facts_of(self, recipe: Recipe, share: float, *, files: bool = False) -> ArtifactFacts | str:
        """Return facts about an artifact, or the reason why it cannot be built. With `files`, build it again if its folder is missing."""
        key = self._key(recipe)
        # Two recipes may have the same parent, and only one thread may build it.
        with self._turns.setdefault(str(recipe), threading.Lock()):
            if (stored := self._stored_facts(key, files)) is not None:
                return stored
            if self._clock.left(share) <= 0:
                return LATE
            with self._store.building(key, self._clock.left(share)) as ours:
                if not ours:
                    return LATE
                # Another search with the same store may have built the artifact while this one waited for the lock.
                stored = self._stored_facts(key, files)
                return stored if stored is not None else self._build(recipe, key, share)

    def _stored_facts(self, key: Mapping[str, Any], files: bool) -> ArtifactFacts | str | None:
        out = self._store.artifact(key)
        stored = self._store.get("builds", key)
        if stored is not None and "error" in stored:
            return str(stored["error"])
        if stored is not None and (not files or (out / MANIFEST).is_file()):
            return ArtifactFacts(**stored)
        return None

    def _build(self, recipe: Recipe, key: Mapping[str, Any], share: float) -> ArtifactFacts | str:
        out = self._store.artifact(key)
        parent: Path | Artifact | None = self._existing.get(str(recipe.parent))
        if recipe.parent is not None and parent is None:
            if isinstance(problem := self._facts_of(recipe.parent, share, files=True), str):
                return problem
            parent = self._store.artifact(self._key(recipe.parent))
        logger.info("building %s", recipe)
        try:
            facts: ArtifactFacts = self._ask(share, build, recipe, parent, out, self._subject.model, self._calibration)
        except AccelError as error:
            self.errors[str(recipe)] = error
            why = f"its artifact could not be created: {error.message.splitlines()[0]}"
            # Store only errors that would occur again. After other errors, such as a full disk or a process that died, the
            # build may succeed in the next search.
            if isinstance(error, StageError | ConfigError | TaskError):
                self._store.put("builds", key, {"error": why})
            return why
        self._store.put("builds", key, asdict(facts))
        return facts
