"""Which of the waiting rows run together.

A batch is padded to its longest row, so rows of like length belong together; a call of the model costs something besides
its tokens, so a batch should not be small either. What a call and a token cost is learnt from the calls themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..artifact.manifest import PADDING_DIFFERENCE
from ..models.base import ORTModel

WINDOW = 512
"""Rows, the oldest first, that are sorted together."""

_MEMORY = 0.98
"""What an earlier call still counts when another one was measured."""


class Waiting(Protocol):
    """A row that waits."""

    @property
    def length(self) -> int:
        """Its tokens."""

    @property
    def count(self) -> int:
        """How many rows of a batch it takes."""

    @property
    def group(self) -> Hashable:
        """Rows of one group can share a call."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call costs besides its tokens, and what a token costs; in seconds."""

    call_s: float
    token_s: float

    @property
    def call_tokens(self) -> float:
        """How many tokens a call is worth."""
        return self.call_s / self.token_s if self.token_s > 0 else float("inf")


class CostModel:
    """Learns the cost of calls: a line through (padded tokens, seconds), recent calls counting most.

    Args:
        call_tokens: How many tokens a call is worth before anything was measured.
    """

    def __init__(self, call_tokens: float = 32.0) -> None:
        self._first = call_tokens
        self._lock = threading.Lock()
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A call of so many tokens, padding counted, took so long."""
        with self._lock:
            self._n = self._n * _MEMORY + 1
            self._x = self._x * _MEMORY + tokens
            self._y = self._y * _MEMORY + seconds
            self._xx = self._xx * _MEMORY + tokens * tokens
            self._xy = self._xy * _MEMORY + tokens * seconds

    def read(self) -> Cost:
        """What is known so far; where all calls were alike, the first guess about what a call is worth."""
        with self._lock:
            n, x, y, xx, xy = self._n, self._x, self._y, self._xx, self._xy
        if not x:
            return Cost(self._first, 1.0)
        spread = n * xx - x * x
        if spread > 0.01 * x * x:
            token = (n * xy - x * y) / spread
            call = (y - token * x) / n
            if token > 0:
                return Cost(max(call, 0.0), token)
        token = y / (x + n * self._first)
        return Cost(token * self._first, token)


def choose(
    waiting: Sequence[Waiting], *, max_rows: int, max_tokens: int, call_tokens: float, window: int = WINDOW
) -> list[int]:
    """Positions of the rows to run now: a batch with the oldest of them in it, of like lengths.

    The window is sorted by length and cut into batches from the longest row down. A batch ends where it is full, or where
    padding all shorter rows up to its longest would cost more than another call.

    Args:
        waiting: Rows, the oldest first; not empty.
        max_rows: Of a batch.
        max_tokens: Of a batch, padding counted; a row that has more runs alone.
        call_tokens: How many tokens a call is worth.
        window: How many rows are looked at.
    """
    group = waiting[0].group
    places = [i for i in range(min(len(waiting), window)) if waiting[i].group == group]
    places.sort(key=lambda i: (-waiting[i].length, i))
    left = sum(waiting[i].count for i in places)
    batch: list[int] = []
    longest = rows = 0
    for i in places:
        row = waiting[i]
        full = rows + row.count > max_rows or (rows + row.count) * longest > max_tokens
        if batch and (full or left * (longest - row.length) > call_tokens):
            if 0 in batch:
                return batch
            batch, rows = [], 0
        if not batch:
            longest = row.length
        batch.append(i)
        rows += row.count
        left -= row.count
    return batch


def can_pad(model: ORTModel) -> bool:
    """Whether a row's answer is the same next to a longer one: the graph has a mask, and padding was found to change nothing."""
    changed = [float(step.validation.get(PADDING_DIFFERENCE, 0)) for step in model.artifact.manifest.steps]
    masked = any(spec.role == "mask" for spec in model.artifact.components[0].inputs)
    return masked and not any(change > 0 for change in changed)
