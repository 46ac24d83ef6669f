"""Tests of the detection of layers whose weights are read by code outside of the layer."""

from __future__ import annotations

import torch
from torch.nn import functional

from accel.capture import read_by_other_code


class Mixed(torch.nn.Module):
    """Model with four layers: one is called, one has a weight that other code reads, one has a size that other code
    reads, and one shares its weight with the output head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called = torch.nn.Linear(4, 4)
        self.read = torch.nn.Linear(4, 4)
        self.asked = torch.nn.Linear(4, 4)
        self.table = torch.nn.Embedding(9, 4)
        self.head = torch.nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.called(self.table(ids)).to(self.asked.weight.dtype) * self.asked.weight.shape[0]
        return self.head(functional.linear(hidden, self.read.weight))


def test_only_weights_used_by_other_code_are_found() -> None:
    model = Mixed().eval()
    assert read_by_other_code(model, {"ids": torch.arange(9)[None]}) == {model.read}
    assert not model.called._forward_hooks
    assert not model.called._forward_pre_hooks
