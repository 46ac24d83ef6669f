"""Data that the parts of a search share: the model, artifacts, candidates, measurements, and the time limit."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..artifact.resolved_model import Resolved
from ..measuring.disturbance import Disturbance
from ..measuring.latency.results import VariantResult
from ..measuring.latency.variants import Variant
from ..measuring.latency.workloads import Load
from .candidates import Candidate, Recipe
from .jobs import Accuracy, ArtifactFacts
from .store import digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model and the machine: everything that a measurement depends on and no candidate changes.

    Attributes:
        model: The PyTorch model, or the artifact to quantize.
        baseline: How it runs unchanged; every candidate is compared with it.
        reference: Name of the baseline in messages.
        digest: Of its files.
        machine: Processors and devices.
        versions: Of every tool.
    """

    model: Resolved
    baseline: Variant
    digest: str
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    reference: str = "PyTorch float32"

    @property
    def task(self) -> str:
        """The model's task."""
        return self.model.task

    @property
    def folder(self) -> Path:
        """Where the model is."""
        return self.model.location.folder

    def variant(self, candidate: Candidate, path: Path) -> Variant:
        """A candidate's artifact and the way to run it."""
        return Variant(
            name=str(candidate), path=path, task=self.task, backend=candidate.backend or None, device=candidate.device or None,
            options=candidate.options, provider_options=candidate.provider_options or None,
            trust_remote_code=self.model.hub.trust_remote_code,
        )  # fmt: skip


def load_key(load: Load) -> dict[str, Any]:
    """Return what identifies the calls of a search."""
    values = {name: getattr(load, name) for name in ("batch", "sequence", "max_length", "threads", "seed")}
    return {**values, "texts": digest(load.texts) if load.texts is not None else None}


@dataclass(slots=True)
class Made:
    """An artifact of the search: how it was made, its folder, and what is known about it."""

    recipe: Recipe
    path: Path
    facts: ArtifactFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A candidate timed next to the baseline.

    Attributes:
        result: Its latencies.
        anchor: The baseline's in the same rounds.
        disturbance: What the machine did meanwhile.
        search: The search that it was made in: an earlier one where it was remembered.
    """

    result: VariantResult
    anchor: VariantResult
    disturbance: Disturbance = field(default_factory=Disturbance)
    search: str = ""

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Measurement:
        """Read a record of the store."""
        noticed = record["disturbance"]
        return cls(
            result=VariantResult.from_dict(record["result"]),
            anchor=VariantResult.from_dict(record["anchor"]),
            disturbance=Disturbance(**{**noticed, "signs": tuple(noticed["signs"])}),
            search=record.get("search", ""),
        )


@dataclass(slots=True)
class Tried:
    """A candidate and what was measured of it.

    Attributes:
        candidate: Recipe and run options.
        made: Its artifact.
        screen: The short measurement.
        final: The long one; the short one where there was no time for it.
        found: Its accuracy.
        reason: Why it was not measured further.
    """

    candidate: Candidate
    made: Made
    screen: Measurement | None = None
    final: Measurement | None = None
    found: Accuracy | None = None
    reason: str = ""

    @property
    def last(self) -> Measurement:
        """The last measurement of a candidate that was timed."""
        last = self.final or self.screen
        assert last is not None, "it was timed"
        return last

    @property
    def identity(self) -> str:
        """Equal for candidates that run the same files in the same way, however they were made."""
        c = self.candidate
        run = [c.backend, c.device, c.options.to_dict(), dict(c.provider_options)]
        return json.dumps([self.made.facts.digest, *run], default=str)


@dataclass(slots=True, kw_only=True)
class Clock:
    """A time limit, shared out over the stages; everything that is asked of another process is cut off at its end.

    Attributes:
        limit_s: Seconds for the search; `None`: no limit.
        started: On the clock of `time.perf_counter`.
        kept_s: Seconds at the end that `until` shares out no more.
    """

    limit_s: float | None
    started: float = field(default_factory=time.perf_counter)
    kept_s: float = 0.0

    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the limit is used up."""
        return math.inf if self.limit_s is None else share * self.limit_s - self.spent()

    def until(self, part: float) -> float:
        """Return the share of the limit that is used up when this part of the time left is: a slow start shortens all stages."""
        return (
            1.0 if self.limit_s is None else (self.spent() + part * max(self.left() - self.kept_s, 0.0)) / self.limit_s
        )

    def keep(self, seconds: float) -> None:
        """Keep time back at the end, half of what is left at most."""
        self.kept_s = min(seconds, max(self.left(), 0.0) / 2)

    def timeout(self, share: float = 1.0) -> float | None:
        """Return how long a process may take to answer; at least 0.1 s, so that nearly finished work still counts."""
        left = self.left(share)
        return None if left == math.inf else max(left, 0.1)
