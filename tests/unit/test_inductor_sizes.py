"""Tests of the sizes that the inductor backend compiles for, and of padding calls to them."""

from __future__ import annotations

import torch

from accel_plugins.pytorch.inductor.sizes import BATCHES, LENGTHS, CallSizes, padded, sizes_of, step_up


def test_compiled_sizes_add_at_most_half() -> None:
    for size in range(1, 2049):
        assert size <= step_up(size, BATCHES) <= max(1.5 * size, size + 1)
    assert step_up(33, LENGTHS) == 48
    assert step_up(10**6, LENGTHS) == 10**6


def test_padding_is_masked_and_added_rows_copy_the_last_row() -> None:
    ids = torch.tensor([[5, 6, 7]])
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    call_sizes = sizes_of(call, maskable=True)
    assert call_sizes == CallSizes(1, 3)
    larger = padded(call, call_sizes, CallSizes(2, 4), pad_id=9)
    assert larger["input_ids"].tolist() == [[5, 6, 7, 9]] * 2
    assert larger["attention_mask"].tolist() == [[1, 1, 1, 0]] * 2
    assert call["input_ids"].shape == (1, 3)
    assert sizes_of(call, maskable=False) == CallSizes(1, None)
