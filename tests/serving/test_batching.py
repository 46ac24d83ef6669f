"""Which rows run together: like lengths, within the budget, the oldest always among them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from accel.serving.batching import CostModel, choose


@dataclass
class Row:
    length: int
    count: int = 1
    group: object = None


def rows(*lengths: int) -> list[Row]:
    return [Row(length) for length in lengths]


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
def test_limits(lengths: tuple[int, ...], limits: dict[str, float], expected: list[int]) -> None:
    assert pick(rows(*lengths), **limits) == expected


def test_a_long_row_does_not_pad_many_short_ones() -> None:
    waiting = rows(*[10] * 15, 400)
    assert pick(waiting) == list(range(15))


def test_a_call_that_costs_much_is_shared_even_so() -> None:
    waiting = rows(*[10] * 15, 400)
    assert pick(waiting, call_tokens=1e6) == list(range(16))


def test_rows_of_another_group_wait() -> None:
    waiting = [Row(8, group="a"), Row(8, group="b"), Row(8, group="a")]
    assert pick(waiting) == [0, 2]


def test_a_request_of_several_rows_counts_as_many() -> None:
    waiting = [Row(8, count=3), Row(8, count=3), Row(8, count=2)]
    assert pick(waiting, max_rows=5) in ([0, 2], [0])


def test_everything_is_run_and_no_batch_is_over_the_budget() -> None:
    chance = random.Random(0)
    waiting = [Row(chance.choice((3, 9, 50, 51, 300, 511)), chance.choice((1, 1, 4))) for _ in range(500)]
    turns = 0
    while waiting:
        oldest = waiting[0]
        chosen = pick(waiting, max_rows=16, max_tokens=2048, window=64)
        batch = [waiting[i] for i in chosen]
        count = sum(row.count for row in batch)
        assert oldest in batch
        assert count <= 16
        assert len(batch) == 1 or count * max(row.length for row in batch) <= 2048
        waiting = [row for i, row in enumerate(waiting) if i not in set(chosen)]
        turns += 1
    assert turns < 250


def test_costs_are_learnt_from_calls() -> None:
    model = CostModel()
    for tokens in (10, 400, 50, 1000, 20, 700) * 5:
        model.add(tokens, 0.002 + tokens * 1e-5)
    cost = model.read()
    assert cost.call_s == pytest.approx(0.002, rel=1e-3)
    assert cost.token_s == pytest.approx(1e-5, rel=1e-3)
    assert cost.call_tokens == pytest.approx(200, rel=1e-2)


def test_calls_that_were_all_alike_tell_nothing_about_the_share_of_a_call() -> None:
    model = CostModel(call_tokens=32)
    for _ in range(10):
        model.add(100, 0.1)
    assert model.read().call_tokens == pytest.approx(32)


def test_what_was_measured_long_ago_is_forgotten() -> None:
    model = CostModel()
    for tokens in (10, 1000) * 20:
        model.add(tokens, tokens * 1e-3)
    for tokens in (10, 1000) * 300:
        model.add(tokens, tokens * 1e-5)
    assert model.read().token_s == pytest.approx(1e-5, rel=0.01)
