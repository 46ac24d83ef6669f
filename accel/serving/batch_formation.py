"""Choose the waiting rows that run together in one model call.

A batch is padded to its longest row, so rows of similar length share a batch. A call also has a fixed cost, so many small batches are
slow. The cost of a call and the cost of a token are measured while the server runs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..artifact.manifest import PADDING_DIFFERENCE
from ..models.base import ORTModel
from .job import Row

WINDOW = 512
"""Number of waiting rows, oldest first, that are sorted by length to form batches."""

_MEMORY = 0.98
"""Factor by which the weight of all earlier calls is multiplied when a call is recorded."""


class CostModel:
    """Linear model of the duration of a call: duration in seconds against tokens including padding. Recent calls have more weight.

    Args:
        call_tokens: Value that the property `call_tokens` returns until calls of different sizes are recorded.
    """

    def __init__(self, call_tokens: float = 32.0) -> None:
        self._first = call_tokens
        self._lock = threading.Lock()
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Record a model call: its number of tokens including padding, and its duration in seconds."""
        with self._lock:
            self._n = self._n * _MEMORY + 1
            self._x = self._x * _MEMORY + tokens
            self._y = self._y * _MEMORY + seconds
            self._xx = self._xx * _MEMORY + tokens * tokens
            self._xy = self._xy * _MEMORY + tokens * seconds

    @property
    def call_tokens(self) -> float:
        """Fixed cost of a call, as the number of tokens that take the same time.

        This is the initial value as long as all recorded calls have nearly the same size.
        """
        with self._lock:
            n, x, y, xx, xy = self._n, self._x, self._y, self._xx, self._xy
        spread = n * xx - x * x
        if spread <= 0.01 * x * x:
            return self._first
        token_s = (n * xy - x * y) / spread
        call_s = (y - token_s * x) / n
        return max(call_s, 0.0) / token_s if token_s > 0 else self._first


def choose(
    waiting: Sequence[Row], *, max_rows: int, max_tokens: int, call_tokens: float, window: int = WINDOW
) -> list[int]:
    """Return the indices of the waiting rows to run now: rows of similar length, including the oldest row.

    The oldest `window` rows are sorted by length and divided into batches, starting with the longest row. A batch ends when it is full, or
    when padding all shorter rows to its longest row would take longer than another call.

    Args:
        waiting: Waiting rows, oldest first; not empty.
        max_rows: Greatest number of rows in a batch.
        max_tokens: Greatest number of tokens in a batch, including padding; a longer row runs alone.
        call_tokens: Fixed cost of a call in tokens, from `CostModel.call_tokens`.
        window: Number of the oldest rows to choose from.
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
    """Return whether padding does not change the outputs: the graph has an attention mask input and validation measured no difference."""
    changed = [float(step.validation.get(PADDING_DIFFERENCE, 0)) for step in model.artifact.manifest.steps]
    masked = any(spec.role == "mask" for spec in model.artifact.components[0].inputs)
    return masked and not any(change > 0 for change in changed)
