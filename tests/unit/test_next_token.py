"""The choice of the next token: torch's own tokens, chosen in one thread of the host."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import LogitsProcessorList

from accel.decoding.host_threads import one_thread, use_one_thread
from accel.decoding.next_token import TokenChoice

IDS = torch.zeros((1, 1), dtype=torch.int64)


def likeliest(scores: torch.Tensor) -> torch.Tensor:
    return TokenChoice(LogitsProcessorList())(IDS, scores)


def drawn(scores: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    return TokenChoice(LogitsProcessorList(), draw=True, generator=generator)(IDS, scores)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_likeliest_token_is_the_first_of_equals(rows: int) -> None:
    scores = torch.randn(rows, 70_000)
    scores[:, 500] = scores[:, 60_000] = 9.0
    assert likeliest(scores).tolist() == [500] * rows
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
def test_scores_that_allow_no_token_are_an_error(value: float) -> None:
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
