"""Tests of `MaskColumns`, which stores the rows of a padded batch without padding."""

from __future__ import annotations

import pytest
import torch

from accel.errors import InputError
from accel_plugins.cuda.forms.unpadded_rows import MaskColumns


def mask_of(*rows: str) -> torch.Tensor:
    return torch.tensor([[char == "1" for char in row] for row in rows])


def test_padding_moves_after_the_tokens() -> None:
    rows = MaskColumns(3)
    added = rows.extend(mask_of("0011", "1111", "1100"))
    assert added.counts.tolist() == [2, 4, 2]
    assert added.order.tolist() == [[2, 3, 0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert added.places.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0, 1, 1, 1]]
    assert not added.whole
    assert rows.lengths.tolist() == [2, 4, 2]
    assert rows.columns == 4


def test_columns_with_only_padding_are_dropped() -> None:
    added = MaskColumns(2).extend(mask_of("0011", "0001"))
    assert added.order.tolist() == [[2, 3], [3, 0]]


def test_steps_crops_and_selections() -> None:
    rows = MaskColumns(2)
    rows.extend(mask_of("011", "111"))
    rows.step()
    rows.step()
    assert rows.lengths.tolist() == [4, 5]
    assert rows.agree(mask_of("01111", "11111"))
    assert not rows.agree(mask_of("11111", "11111"))
    copy = rows.clone()
    rows.crop(4)
    assert (rows.columns, rows.lengths.tolist()) == (4, [3, 4])
    rows.crop(1)
    assert (rows.columns, rows.lengths.tolist()) == (1, [0, 1])
    copy.select(torch.tensor([1, 0, 0]))
    assert copy.lengths.tolist() == [5, 4, 4]


def test_changed_mask_is_refused() -> None:
    rows = MaskColumns(1)
    rows.extend(mask_of("011"))
    with pytest.raises(InputError, match="earlier"):
        rows.extend(mask_of("1111"))
    assert rows.columns == 3
    rows.extend(mask_of("01101"))
    assert rows.lengths.tolist() == [3]


@pytest.mark.parametrize(("row", "unbroken"), [("0011", True), ("1100", True), ("1011", False), ("1111", True)])
def test_padding_between_tokens_is_detected(row: str, unbroken: bool) -> None:
    rows = MaskColumns(2)
    rows.extend(mask_of("1111", row))
    assert rows.unbroken is unbroken


def test_tokens_after_right_padding_are_not_contiguous() -> None:
    rows = MaskColumns(1)
    rows.extend(mask_of("1100"))
    assert rows.unbroken
    rows.step()
    assert not rows.unbroken
