"""Split the rows of a batch into calls of the graph, based on the measured durations of earlier calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FIRST = 2
_ENOUGH = 8
_FORGET = 0.98


class CallCosts:
    """Measured duration of calls of the graph: a fixed time per call, and a time per token, including padding.

    `divide` uses both times. On a GPU or for a small model, a call takes much longer than a token, so all rows run in one call. On a CPU,
    tokens are expensive, so rows of similar length run in separate calls if the saved padding takes longer than the additional calls. Until
    enough calls are measured, all rows run in one call.
    """

    def __init__(self) -> None:
        self._seen = 0
        # Weighted sums of 1, tokens, tokens squared, seconds, and tokens times seconds. Older calls have less weight.
        self._sums = np.zeros(5)

    @property
    def tokens(self) -> float:
        """The fixed time of a call, as the number of tokens that take the same time.

        The value is infinite if the fixed time is not known yet, or if additional tokens take no measurable time.
        """
        count, x, xx, y, xy = self._sums
        spread = count * xx - x * x
        if self._seen < _ENOUGH or spread <= 1e-9 * count * xx:
            return float("inf")
        token = (count * xy - x * y) / spread
        call = (y - token * x) / count
        # A negative fixed time can only be measurement noise, so use 0.
        return max(call, 0.0) / token if token > 0 else float("inf")

    def note(self, tokens: int, seconds: float) -> None:
        """Record the number of tokens and the duration in seconds of a call."""
        self._seen += 1
        if self._seen > _FIRST:
            new = np.array([1.0, tokens, tokens * tokens, seconds, tokens * seconds])
            self._sums = self._sums * _FORGET + new

    def divide(self, lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Split sorted rows into calls and return the index range (start, end) of the rows of each call.

        Args:
            lengths: Number of tokens of each row, the shortest first.
            most: Greatest number of rows in a call.
        """
        call = self.tokens
        if call == float("inf"):
            return [(start, min(start + most, len(lengths))) for start in range(0, len(lengths), most)]
        # Dynamic programming. For the first `end` rows: the least cost, and the index of the first row of the last call.
        costs, begins = [0.0], [0]
        for end in range(1, len(lengths) + 1):
            options = [
                (costs[start] + call + (end - start) * lengths[end - 1], start)
                for start in range(max(0, end - most), end)
            ]
            cost, start = min(options)
            costs.append(cost)
            begins.append(start)
        parts, end = [], len(lengths)
        while end:
            parts.append((begins[end], end))
            end = begins[end]
        return parts[::-1]
