"""Artifacts of a search: made once, in processes of their own or in this one, and remembered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import progress
from ..artifact.manifest import MANIFEST, Artifact
from ..artifact.writing import discard
from ..config import available_processors
from ..errors import AccelError, ConfigError, SessionError, StageError, TaskError
from ..interfaces.protocols import Feeds
from ..measuring.processes import Helper
from .candidates import Recipe
from .jobs import ArtifactFacts, CalibrationData, build, facts_of
from .store import Store, data_digest
from .subject import Clock, Made, Subject

logger = logging.getLogger(__name__)

LATE = "not tried: the time limit was near"


class _SameThread(Executor):
    """Runs what is submitted at once."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **named))
        return future


class Builder:
    """Makes the artifacts of recipes; a recipe that fails is a rejected candidate.

    Args:
        subject: What is tuned.
        store: What earlier searches made.
        clock: The time limit.
        calibration: Rows for schemes that need them, which are not offered when `None`; or batches of inputs, with which nothing
            is remembered from one search to the next.
        processes: How many build at a time; 0: this process builds, with calibration data and models that no other can be sent.

    Attributes:
        failed: Recipes that could not be made, and why.
        errors: The errors of recipes that failed in this search.
    """

    def __init__(
        self,
        subject: Subject,
        store: Store,
        clock: Clock,
        *,
        calibration: CalibrationData | Iterable[Feeds] | None = None,
        processes: int = 2,
    ) -> None:
        self._subject, self._store, self._clock = subject, store, clock
        self._calibration = calibration
        self._helpers = [Helper() for _ in range(min(processes, available_processors()))]
        self._of_thread = threading.local()
        free = iter(self._helpers)
        self._pool: Executor = _SameThread()
        if processes:
            self._pool = ThreadPoolExecutor(
                len(self._helpers), initializer=lambda: setattr(self._of_thread, "helper", next(free))
            )
        self._turns: dict[str, threading.Lock] = {}
        self._made: dict[str, Made] = {}
        self._given: dict[str, Artifact] = {}
        self.failed: dict[str, str] = {}
        self.errors: dict[str, AccelError] = {}

    def __getitem__(self, recipe: Recipe) -> Made:
        """Return the artifact of a recipe that was built."""
        return self._made[str(recipe)]

    def add(self, recipe: Recipe, artifact: Artifact) -> Made:
        """Add an artifact that exists, for recipes to start from."""
        self._given[str(recipe)] = artifact
        made = self._made[str(recipe)] = Made(recipe, artifact.path, facts_of(artifact))
        return made

    def close(self) -> None:
        """End the processes at once, so that Ctrl-C does not wait for a build."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for helper in self._helpers:
            helper.end()
        self._pool.shutdown()
        for helper in self._helpers:
            helper.close()

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call `function(*args)` in the next free process."""
        return self._pool.submit(self._ask, 1.0, function, *args)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)` in the next free process and wait for the result."""
        return self.start(function, *args).result()

    def build(self, recipes: Sequence[Recipe], share: float) -> list[Made]:
        """Make artifacts; see `begin`."""
        return self.finish(self.begin(recipes, share))

    def begin(self, recipes: Sequence[Recipe], share: float) -> list[tuple[Recipe, Future[ArtifactFacts | str]]]:
        """Start to make artifacts.

        Args:
            recipes: What to make.
            share: Of the time limit; a build that is not done by then is given up.
        """
        return [(recipe, self._pool.submit(self._one, recipe, share)) for recipe in recipes]

    def finish(self, begun: Sequence[tuple[Recipe, Future[ArtifactFacts | str]]]) -> list[Made]:
        """Wait for the builds that `begin` started; the reasons of failures go to `failed`."""
        for recipe, future in progress.track(begun, "building"):
            facts = future.result()
            if isinstance(facts, str):
                self.failed[str(recipe)] = facts
                logger.info("%s: %s", recipe, facts)
            else:
                self._made[str(recipe)] = Made(recipe, self._store.artifact(self._key(recipe)), facts)
        return [self._made[str(recipe)] for recipe, _ in begun if str(recipe) in self._made]

    def files(self, made: Made) -> None:
        """Rebuild the folder of a known artifact where an earlier run removed it.

        Raises:
            SessionError: It cannot be made any more.
        """
        if str(made.recipe) in self._given:
            return
        facts = self._pool.submit(self._one, made.recipe, 1.0, files=True).result()
        if isinstance(facts, str):
            raise SessionError(facts)

    def tidy(self, kept: set[Path]) -> None:
        """Remove the files of artifacts that lost; exports and all results stay."""
        lost = [made.path for made in self._made.values() if made.recipe.parent is not None and made.path not in kept]
        with self._store.alone() as alone:
            for path in lost if alone else ():
                discard(path)

    def _ask(self, share: float, function: Callable[..., Any], *args: Any) -> Any:
        helper: Helper | None = getattr(self._of_thread, "helper", None)
        if helper is None:
            return function(*args)
        return helper.call(function, *args, timeout_s=self._clock.timeout(share))

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

    def _one(self, recipe: Recipe, share: float, *, files: bool = False) -> ArtifactFacts | str:
        """Return facts about an artifact, or the reason why it cannot be built; with `files`, rebuild a folder that is gone."""
        # Two recipes may start from the same one, and only one of their processes may make it.
        with self._turns.setdefault(str(recipe), threading.Lock()):
            return self._one_alone(recipe, share, files)

    def _one_alone(self, recipe: Recipe, share: float, files: bool) -> ArtifactFacts | str:
        key = self._key(recipe)
        known = self._known(key, files)
        if known is not None:
            return known
        if self._clock.left(share) <= 0:
            return LATE
        with self._store.building(key, self._clock.left(share)) as ours:
            if not ours:
                return LATE
            # Another search on the same store may have made it while this one waited.
            found = self._known(key, files)
            return found if found is not None else self._build(recipe, key, share)

    def _known(self, key: Mapping[str, Any], files: bool) -> ArtifactFacts | str | None:
        out = self._store.artifact(key)
        known = self._store.get("builds", key)
        if known is not None and "error" in known:
            return str(known["error"])
        if known is not None and (not files or (out / MANIFEST).is_file()):
            return ArtifactFacts(**known)
        return None

    def _build(self, recipe: Recipe, key: Mapping[str, Any], share: float) -> ArtifactFacts | str:
        out = self._store.artifact(key)
        parent: Path | Artifact | None = self._given.get(str(recipe.parent))
        if recipe.parent is not None and parent is None:
            if isinstance(problem := self._one(recipe.parent, share, files=True), str):
                return problem
            parent = self._store.artifact(self._key(recipe.parent))
        logger.info("building %s", recipe)
        try:
            facts: ArtifactFacts = self._ask(share, build, recipe, parent, out, self._subject.model, self._calibration)
        except AccelError as error:
            self.errors[str(recipe)] = error
            why = f"building it failed: {error.message.splitlines()[0]}"
            # Others are not the candidate's: the process died, the disk was full, a folder was removed under it.
            if isinstance(error, StageError | ConfigError | TaskError):
                self._store.put("builds", key, {"error": why})
            return why
        self._store.put("builds", key, asdict(facts))
        return facts
