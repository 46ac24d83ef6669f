"""How the rows of a batch are divided among calls of the graph, as their times have shown it to be worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FIRST = 2
_ENOUGH = 8
_FORGET = 0.98


class Calls:
    """What a call costs: so many seconds, and so many for each token, its padding included.

    Where a call costs much beside a token (a GPU, a small model), all rows go together; where tokens cost (a processor), rows of
    like length do, as far as they save more padding than the calls cost. Learnt from the calls themselves; until there are enough
    of them, all rows go together.
    """

    def __init__(self) -> None:
        self._seen = 0
        # Sums of 1, tokens, tokens squared, seconds, and tokens times seconds, the older the less.
        self._sums = np.zeros(5)

    @property
    def tokens(self) -> float:
        """The tokens that cost as much as a call by itself; infinite where that is not known, or tokens cost nothing."""
        count, x, xx, y, xy = self._sums
        spread = count * xx - x * x
        if self._seen < _ENOUGH or spread <= 1e-9 * count * xx:
            return float("inf")
        token = (count * xy - x * y) / spread
        call = (y - token * x) / count
        # Below zero there is noise alone.
        return max(call, 0.0) / token if token > 0 else float("inf")

    def note(self, tokens: int, seconds: float) -> None:
        """A call of that many tokens took that long."""
        self._seen += 1
        if self._seen > _FIRST:
            new = np.array([1.0, tokens, tokens * tokens, seconds, tokens * seconds])
            self._sums = self._sums * _FORGET + new

    def divide(self, lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Parts of rows that are sorted by length, each a call: where they begin and end.

        Args:
            lengths: Tokens of each row, the shortest first.
            most: Rows of a call at most.
        """
        call = self.tokens
        if call == float("inf"):
            return [(start, min(start + most, len(lengths))) for start in range(0, len(lengths), most)]
        # The cheapest way to have the first rows answered, and where its last call begins.
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
