"""Tests of repeated calls, with replacement functions for CUDA graphs: which graph gives the output, and which graph
starts before the mask is read.
"""

from __future__ import annotations

from collections.abc import Callable

from accel_plugins.pytorch.inductor.forms import CompilationPlan
from accel_plugins.pytorch.inductor.packing import TokenCounter, Tokens
from accel_plugins.pytorch.inductor.replays import ReplayedCalls
from accel_plugins.pytorch.inductor.sizes import CallSizes


def replays(done: list[object]) -> tuple[ReplayedCalls, Callable[[Tokens], TokenCounter]]:
    """Return a `ReplayedCalls` object with graphs for 256 tokens and for all tokens, and a function that creates mask
    readers.

    Each graph appends its number of tokens to `done` when it runs. A mask reader appends "mask", or "mask, later" if a
    graph has already started.
    """

    def graph(tokens: Tokens) -> Callable[[object], str]:
        def replay(_: object) -> str:
            done.append(tokens)
            return f"answer of {tokens}"

        return replay

    def request(tokens: Tokens) -> TokenCounter:
        def wait(begun: bool) -> Tokens:
            done.append("mask, later" if begun else "mask")
            return tokens

        return wait

    sizes = CallSizes(16, 256)
    return ReplayedCalls(
        CompilationPlan("", sizes, 0, sizes), {tokens: graph(tokens) for tokens in ("all", 256)}
    ), request


def test_graph_starts_early_after_eight_equal_calls() -> None:
    done: list[object] = []
    calls, request = replays(done)
    for _ in range(8):
        assert calls.answer({}, request("all")) == "answer of all"
    assert done == ["mask", "all"] * 8
    done.clear()
    assert calls.answer({}, request("all")) == "answer of all"
    assert done == ["all", "mask, later"]


def test_wrong_guess_is_recomputed_and_doubles_the_required_calls() -> None:
    done: list[object] = []
    calls, request = replays(done)
    for _ in range(8):
        calls.answer({}, request(256))
    done.clear()
    assert calls.answer({}, request("all")) == "answer of all"
    assert done == [256, "mask, later", "all"]
    done.clear()
    for _ in range(15):
        calls.answer({}, request("all"))
    assert done == ["mask", "all"] * 15
    done.clear()
    calls.answer({}, request("all"))
    assert done == ["all", "mask, later"]


def test_token_count_without_graph_returns_none() -> None:
    done: list[object] = []
    calls, request = replays(done)
    for _ in range(10):
        assert calls.answer({}, request(512)) is None
    assert done == ["mask"] * 10
    assert calls.answer({}, None) is None
