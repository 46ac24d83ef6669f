"""Tests of the choice of waiting rows for the next model call: rows of similar length, within the limits, and always
including the oldest row.
"""

from __future__ import annotations

import random

import pytest

from accel.serving.batch_formation import CostModel, choose
from accel.serving.job import Row


def row(length: int, count: int = 1, group: str = "") -> Row:
    return Row(inputs=None, length=length, count=count, group=group)


def rows(*lengths: int) -> list[Row]:
    return [row(length) for length in lengths]


def pick(waiting: list[Row], **limits: float) -> list[int]:
    settings = {"max_rows": 64, "max_tokens": 10_000, "call_tokens": 32.0, **limits}
    return sorted(choose(waiting, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "limits", "expected"),
    [
        ((8,), {}, [0]),
        ((8, 8, 8), {}, [0, 1, 2]),
        ((8, 8, 8), {"max_rows": 2}, [0, 1]),
        ((100, 8, 8), {"max_tokens": 110}, [0]),
        ((8, 100, 8), {"max_tokens": 110}, [0, 2]),
        ((20_000, 8), {}, [0]),
    ],
    ids=["alone", "all", "rows", "tokens", "the-oldest-comes-first", "longer-than-the-budget"],
)
def test_limits_of_a_batch(lengths: tuple[int, ...], limits: dict[str, float], expected: list[int]) -> None:
    assert pick(rows(*lengths), **limits) == expected


def test_long_row_does_not_pad_many_short_rows() -> None:
    waiting = rows(*[10] * 15, 400)
    assert pick(waiting) == list(range(15))


def test_expensive_call_includes_all_lengths() -> None:
    waiting = rows(*[10] * 15, 400)
    assert pick(waiting, call_tokens=1e6) == list(range(16))


def test_rows_of_another_group_wait() -> None:
    waiting = [row(8, group="a"), row(8, group="b"), row(8, group="a")]
    assert pick(waiting) == [0, 2]


def test_request_of_several_rows_counts_all_its_rows() -> None:
    waiting = [row(8, count=3), row(8, count=3), row(8, count=2)]
    assert pick(waiting, max_rows=5) in ([0, 2], [0])


def test_every_row_runs_and_no_batch_exceeds_the_budget() -> None:
    chance = random.Random(0)
    waiting = [row(chance.choice((3, 9, 50, 51, 300, 511)), chance.choice((1, 1, 4))) for _ in range(500)]
    turns = 0
    while waiting:
        oldest = waiting[0]
        chosen = pick(waiting, max_rows=16, max_tokens=2048, window=64)
        batch = [waiting[i] for i in chosen]
        count = sum(group.count for group in batch)
        assert oldest in batch
        assert count <= 16
        assert len(batch) == 1 or count * max(group.length for group in batch) <= 2048
        waiting = [group for i, group in enumerate(waiting) if i not in set(chosen)]
        turns += 1
    assert turns < 250


def test_costs_are_measured_from_calls() -> None:
    model = CostModel()
    for tokens in (10, 400, 50, 1000, 20, 700) * 5:
        model.add(tokens, 0.002 + tokens * 1e-5)
    assert model.call_tokens == pytest.approx(200, rel=1e-2)


def test_equal_calls_keep_the_initial_cost() -> None:
    model = CostModel(call_tokens=32)
    for _ in range(10):
        model.add(100, 0.1)
    assert model.call_tokens == pytest.approx(32)


def test_old_measurements_are_forgotten() -> None:
    model = CostModel()
    for tokens in (10, 1000) * 20:
        model.add(tokens, 0.1 + tokens * 1e-3)
    for tokens in (10, 1000) * 300:
        model.add(tokens, 0.1 + tokens * 1e-4)
    assert model.call_tokens == pytest.approx(1000, rel=0.01)
