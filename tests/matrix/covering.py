"""Selection of a small set of cases that covers all targets, with a greedy algorithm. The result depends only on the
cases and the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import numpy as np

T = TypeVar("T")


Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs(factors: Mapping[str, str]) -> list[Pair]:
    """Return all pairs of values of two different factors."""
    return list(combinations(factors.items(), 2))


def cover(
    cases: Sequence[T],
    targets: Callable[[T], Iterable[Hashable]],
    *,
    stages: Callable[[T], Mapping[str, float]] = lambda case: {},
    seconds: float = 0.3,
    seed: int = 0,
) -> list[T]:
    """Choose cases until every target is covered. Each step adds the case that covers the most new targets per second.

    Args:
        cases: All valid cases. Only targets that occur in these cases must be covered.
        targets: Function that returns the targets that a case covers.
        stages: Function that returns the artifacts that a case needs, with the seconds to make each artifact. An
            artifact that a chosen case already needs costs no additional time.
        seconds: Time of a case in addition to its artifacts.
        seed: Seed of the order of equally good cases.
    """
    order = np.random.default_rng(seed).permutation(len(cases))
    shuffled = [cases[i] for i in order]
    target_rows, covered = _table([list(targets(case)) for case in shuffled])
    made_by = [stages(case) for case in shuffled]
    needed, available = _table([list(costs) for costs in made_by])
    cost = np.zeros(len(available))
    for row, costs in zip(needed, made_by, strict=True):
        cost[row[: len(costs)]] = list(costs.values())
    chosen: list[int] = []
    while not covered.all():
        gain = (~covered)[target_rows].sum(axis=1)
        price = seconds + np.where(available, 0.0, cost)[needed].sum(axis=1)
        best = int(np.argmax(gain / price))
        covered[target_rows[best]], available[needed[best]] = True, True
        chosen.append(best)
    return [shuffled[i] for i in _without_spare({i: np.unique(target_rows[i]) for i in chosen}, len(covered))]


def _without_spare(meets: dict[int, np.ndarray], numbers: int) -> list[int]:
    """Remove chosen cases whose targets are all covered by other chosen cases. About one in ten cases of a greedy
    choice is removed.

    Args:
        meets: Target numbers of each chosen case, in the order of the choice.
        numbers: Number of all targets, including the last target, which pads short rows.
    """
    times = np.zeros(numbers, np.int64)
    times[-1] = len(meets) + 1
    for targets in meets.values():
        times[targets] += 1
    necessary = []
    for i, targets in meets.items():
        if (times[targets] > 1).all():
            times[targets] -= 1
        else:
            necessary.append(i)
    return necessary


def _table(rows: Sequence[Sequence[Hashable]]) -> tuple[np.ndarray, np.ndarray]:
    """Convert rows of objects to rows of numbers.

    Return the rows, `(rows, longest) int64`, and a mask of the covered numbers, `(numbers + 1,) bool`. The last number
    pads short rows and counts as covered from the start.
    """
    numbers: dict[Hashable, int] = {}
    for row in rows:
        for item in row:
            numbers.setdefault(item, len(numbers))
    table = np.full((len(rows), max((len(row) for row in rows), default=0)), len(numbers), np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = [numbers[item] for item in row]
    covered = np.zeros(len(numbers) + 1, bool)
    covered[-1] = True
    return table, covered
