"""Data classes that the parts of a search share: the model, artifacts, candidates, measurements, and the time limit."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..artifact.resolved_model import ResolvedModel
from ..measuring.accuracy.comparison import Comparison
from ..measuring.disturbance import Disturbance
from ..measuring.latency.results import VariantResult
from ..measuring.latency.variants import Variant
from ..measuring.latency.workloads import WorkloadSettings
from .candidates import Candidate, Recipe
from .jobs import Accuracy, ArtifactFacts
from .store import digest


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSubject:
    """The model and the machine: everything that measurements depend on and that is the same for all candidates.

    Attributes:
        model: The PyTorch model, or the artifact to quantize.
        baseline: The unchanged model, with which every candidate is compared.
        reference: Name of the baseline in messages.
        digest: Digest of the model's files.
        machine: Processors and devices of the machine.
        versions: Versions of the libraries that results depend on.
    """

    model: ResolvedModel
    baseline: Variant
    digest: str
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    reference: str = "PyTorch float32"

    @property
    def task(self) -> str:
        """Task of the model."""
        return self.model.task

    @property
    def folder(self) -> Path:
        """Folder of the model."""
        return self.model.location.folder

    def variant(self, candidate: Candidate, path: Path) -> Variant:
        """Return the variant that runs a candidate's artifact at `path`."""
        return Variant(
            name=str(candidate), path=path, task=self.task, backend=candidate.backend or None, device=candidate.device or None,
            options=candidate.options, provider_options=candidate.provider_options or None,
            trust_remote_code=self.model.hub.trust_remote_code,
        )  # fmt: skip


def load_key(load: WorkloadSettings) -> dict[str, Any]:
    """Return the settings that identify the calls of a search, as part of the store's keys."""
    values = {name: getattr(load, name) for name in ("batch", "sequence", "max_length", "threads", "seed")}
    return {**values, "texts": digest(load.texts) if load.texts is not None else None}


@dataclass(slots=True)
class BuiltArtifact:
    """An artifact that the search built: its recipe, its folder, and facts about it."""

    recipe: Recipe
    path: Path
    facts: ArtifactFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurement of a candidate that was timed next to the baseline.

    Attributes:
        result: Latencies of the candidate.
        anchor: Latencies of the baseline in the same rounds.
        disturbance: Signs that other programs used the machine during the measurement.
        search: Id of the search that made the measurement; an earlier search if the result was stored.
    """

    result: VariantResult
    anchor: VariantResult
    disturbance: Disturbance = field(default_factory=Disturbance)
    search: str = ""


@dataclass(slots=True)
class TriedCandidate:
    """A candidate and its measurements.

    Attributes:
        candidate: Recipe and run options.
        artifact: The artifact that the recipe builds.
        screen: The short measurement.
        final: The long measurement; the short one if there was no time for a long one.
        accuracy: Accuracy of the candidate.
        reason: Reason why it was not measured further; empty if there is none.
    """

    candidate: Candidate
    artifact: BuiltArtifact
    screen: Measurement | None = None
    final: Measurement | None = None
    accuracy: Accuracy | None = None
    reason: str = ""

    @property
    def last(self) -> Measurement:
        """The last measurement: the long measurement, or the short measurement if there is no long measurement."""
        last = self.final or self.screen
        assert last is not None, "it was timed"
        return last

    @property
    def compared(self) -> Comparison:
        """Comparison with the baseline, for a candidate whose accuracy was measured."""
        assert self.accuracy is not None, "its accuracy was measured"
        assert self.accuracy.comparison is not None
        return self.accuracy.comparison

    @property
    def identity(self) -> str:
        """Key that is equal for candidates that run the same files in the same way, even if their recipes differ."""
        c = self.candidate
        run = [c.backend, c.device, c.options.to_dict(), dict(c.provider_options)]
        return json.dumps([self.artifact.facts.digest, *run], default=str)


@dataclass(slots=True, kw_only=True)
class TimeBudget:
    """A time limit that is divided among the stages of a search. Work in other processes is stopped when the limit is reached.

    Attributes:
        limit_s: Time limit of the search in seconds; `None` for no limit.
        started: Start time, as a value of `time.perf_counter`.
        kept_s: Seconds reserved at the end, which `until` does not divide.
    """

    limit_s: float | None
    started: float = field(default_factory=time.perf_counter)
    kept_s: float = 0.0

    def spent(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.started

    def left(self, share: float = 1.0) -> float:
        """Return the number of seconds until the fraction `share` of the time limit has passed."""
        return math.inf if self.limit_s is None else share * self.limit_s - self.spent()

    def until(self, part: float) -> float:
        """Return the fraction of the time limit that will have passed when `part` of the remaining time is used up."""
        return (
            1.0 if self.limit_s is None else (self.spent() + part * max(self.left() - self.kept_s, 0.0)) / self.limit_s
        )

    def keep(self, seconds: float) -> None:
        """Reserve time at the end, at most half of the remaining time."""
        self.kept_s = min(seconds, max(self.left(), 0.0) / 2)

    def timeout(self, share: float = 1.0) -> float | None:
        """Return the timeout of a process in seconds; at least 0.1 s, so that nearly finished work still counts."""
        left = self.left(share)
        return None if left == math.inf else max(left, 0.1)
