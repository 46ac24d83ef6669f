"""Tests of the functions that replace transformers' recurrences during tracing: they compute the same values, from any
initial state.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from accel.capture import recurrence

BATCH, TOKENS, HEADS = 2, 7, 4
# The tolerance is for float32 sums of about ten to a hundred values of order 1, added in a different order.
CLOSE = 1e-5


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def selective() -> dict[str, Any]:
    return {
        "hidden_states": draw(BATCH, 6, TOKENS),
        "dt": draw(BATCH, 6, TOKENS),
        "A": -draw(6, 5).exp(),
        "B": draw(BATCH, 5, TOKENS),
        "C": draw(BATCH, 5, TOKENS),
        "D": draw(6),
        "z": draw(BATCH, 6, TOKENS),
        "delta_bias": draw(6),
        "delta_softplus": True,
        "return_last_state": True,
    }


def chunked() -> dict[str, Any]:
    return {
        "hidden_states": draw(BATCH, TOKENS, HEADS, 6),
        "dt": draw(BATCH, TOKENS, HEADS),
        "A": -draw(HEADS).exp(),
        "B": draw(BATCH, TOKENS, 2, 5),
        "C": draw(BATCH, TOKENS, 2, 5),
        "chunk_size": 4,
        "D": draw(HEADS),
        "dt_bias": draw(HEADS),
        "dt_softplus": True,
        "dt_limit": (0.1, 2.0),
        "return_final_states": True,
    }


def delta(groups: int, *decays: int) -> dict[str, Any]:
    return {
        "query": draw(BATCH, TOKENS, groups, 5),
        "key": draw(BATCH, TOKENS, groups, 5),
        "value": draw(BATCH, TOKENS, HEADS, 6),
        "g": -draw(BATCH, TOKENS, HEADS, *decays).exp(),
        "beta": draw(BATCH, TOKENS, HEADS).sigmoid(),
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
    }


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "mamba": (modeling_mamba, "mamba_selective_scan", selective()),
    "mamba-2": (modeling_mamba2, "mamba2_chunk_scan", chunked()),
    "gated delta rule": (modeling_qwen3_next, "torch_chunk_gated_delta_rule", delta(2)),
    "kimi's delta rule": (modeling_kimi_linear, "chunk_kimi_delta_attention", delta(HEADS, 5)),
}


@pytest.mark.parametrize("case", CASES)
def test_results_equal_transformers(case: str) -> None:
    module, name, arguments = CASES[case]
    expected, _ = getattr(module, name)(**arguments)
    layer = torch.nn.Identity()
    layer.__class__ = type("Layer", (torch.nn.Identity,), {"__module__": module.__name__})
    with recurrence.recurrent(layer):
        ours = getattr(module, name)
        output, _ = ours(**arguments)
    assert getattr(module, name) is not ours
    assert (output - expected).abs().max() <= CLOSE * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("beta", [False, True])
def test_recurrence_continues_from_a_state(beta: bool) -> None:
    decay, key = -draw(BATCH, TOKENS, HEADS, 1, 1).exp(), draw(BATCH, TOKENS, HEADS, 5)
    value, query = draw(BATCH, TOKENS, HEADS, 6), draw(BATCH, TOKENS, HEADS, 5)
    weight = draw(BATCH, TOKENS, HEADS).sigmoid() if beta else None

    def part(start: int, end: int, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        cut = [tensor[:, start:end] for tensor in (decay, key, value, query)]
        return recurrence.recur(*cut, beta=weight[:, start:end] if weight is not None else None, state=state)

    full, last = part(0, TOKENS, None)
    first, state = part(0, 3, None)
    second, after = part(3, TOKENS, state)
    assert (torch.cat([first, second], dim=1) - full).abs().max() <= CLOSE
    assert (after - last).abs().max() <= CLOSE
