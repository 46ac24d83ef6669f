"""A small set of cases in which everything asked for occurs: a greedy cover, the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import numpy as np

T = TypeVar("T")


Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs(factors: Mapping[str, str]) -> list[Pair]:
    """Every pair of values of two factors."""
    return list(combinations(factors.items(), 2))


def cover(
    cases: Sequence[T],
    targets: Callable[[T], Iterable[Hashable]],
    *,
    stages: Callable[[T], Mapping[str, float]] = lambda case: {},
    seconds: float = 0.3,
    seed: int = 0,
) -> list[T]:
    """Choose cases until every target of any of them is met; the next is the one that meets most for its time.

    Args:
        cases: All that are valid, so that what cannot occur together never asks to be met.
        targets: What a case meets.
        stages: What a case makes before it runs, with its seconds; what a chosen case made costs nothing again.
        seconds: What a case takes besides.
        seed: Order of cases that are equally good.
    """
    order = np.random.default_rng(seed).permutation(len(cases))
    shuffled = [cases[i] for i in order]
    wanted, met = _table([list(targets(case)) for case in shuffled])
    made_by = [stages(case) for case in shuffled]
    needed, made = _table([list(one) for one in made_by])
    cost = np.zeros(len(made))
    for row, one in zip(needed, made_by, strict=True):
        cost[row[: len(one)]] = list(one.values())
    chosen: list[int] = []
    while not met.all():
        gain = (~met)[wanted].sum(axis=1)
        price = seconds + np.where(made, 0.0, cost)[needed].sum(axis=1)
        best = int(np.argmax(gain / price))
        met[wanted[best]], made[needed[best]] = True, True
        chosen.append(best)
    return [shuffled[i] for i in _without_spare({i: np.unique(wanted[i]) for i in chosen}, len(met))]


def _without_spare(meets: dict[int, np.ndarray], numbers: int) -> list[int]:
    """Leave out what was chosen early and is not needed beside what was chosen later: one in ten of a greedy choice.

    Args:
        meets: The targets of what was chosen, in the order of the choice.
        numbers: Of all targets, the last being what fills short rows.
    """
    times = np.zeros(numbers, np.int64)
    times[-1] = len(meets) + 1
    for targets in meets.values():
        times[targets] += 1
    kept = []
    for i, targets in meets.items():
        if (times[targets] > 1).all():
            times[targets] -= 1
        else:
            kept.append(i)
    return kept


def _table(rows: Sequence[Sequence[Hashable]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of things as rows of their numbers `(rows, most) int64`, and for each number whether it is met: `(numbers + 1,)
    bool`. The last number fills short rows, and is met from the start.
    """
    numbers: dict[Hashable, int] = {}
    for row in rows:
        for thing in row:
            numbers.setdefault(thing, len(numbers))
    table = np.full((len(rows), max((len(row) for row in rows), default=0)), len(numbers), np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = [numbers[thing] for thing in row]
    met = np.zeros(len(numbers) + 1, bool)
    met[-1] = True
    return table, met
