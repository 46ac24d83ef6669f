"""Tokens of logits on the host: torch's own, chosen in one thread."""

from __future__ import annotations

import threading

import pytest
import torch

from accel.decoding.next_token import drawn, likeliest, one_thread, use_one_thread


@pytest.mark.parametrize("rows", [1, 3])
def test_likeliest_is_argmax_with_ties_and_numbers_that_are_none(rows: int) -> None:
    scores = torch.randn(rows, 70_000)
    scores[:, 500] = scores[:, 60_000] = 9.0
    assert torch.equal(likeliest(scores), scores.argmax(-1))
    assert likeliest(scores).tolist() == [500] * rows
    scores[0, 7] = torch.nan
    assert torch.equal(likeliest(scores), scores.argmax(-1))
    assert torch.equal(likeliest(scores.bfloat16()), scores.bfloat16().argmax(-1))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("hidden", [0, 69_990])
def test_draws_are_those_of_multinomial(rows: int, hidden: int) -> None:
    scores = 5 * torch.randn(rows, 70_000)
    scores[:, :hidden] = -torch.inf
    for seed in range(20):
        one, other = (torch.Generator().manual_seed(seed) for _ in range(2))
        expected = torch.multinomial(scores.softmax(-1), 1, generator=one).squeeze(1)
        assert torch.equal(drawn(scores, other), expected)
        assert torch.equal(one.get_state(), other.get_state())
    torch.manual_seed(3)
    expected = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
    torch.manual_seed(3)
    assert torch.equal(drawn(scores), expected)


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_nothing_is_drawn_of_scores_that_allow_nothing(value: float) -> None:
    scores = torch.randn(2, 100)
    scores[1] = value
    with pytest.raises(RuntimeError, match="no token"):
        drawn(scores)


def test_one_thread_is_this_thread_alone() -> None:
    usual, begin = torch.get_num_threads(), threading.Event()
    found: dict[str, int] = {}

    def count(name: str) -> None:
        found[name] = torch.get_num_threads()

    def other() -> None:
        count("before")
        begin.wait()
        count("meanwhile")

    waiting = threading.Thread(target=other)
    waiting.start()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
            begin.set()
            waiting.join()
            fresh = threading.Thread(target=count, args=("fresh",))
            fresh.start()
            fresh.join()
        assert torch.get_num_threads() == 2

        limited = threading.Thread(target=lambda: (use_one_thread(), count("limited")))
        limited.start()
        limited.join()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)
    assert found["meanwhile"] == found["before"]
    assert (found["fresh"], found["limited"]) == (2, 1)
