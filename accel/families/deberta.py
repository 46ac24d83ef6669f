"""Family of DeBERTa, whose range of relative positions depends on the length of the text."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.family import Family, Replacement


def _span(query: torch.Tensor, key: torch.Tensor, farthest: int) -> Any:
    """Return the largest relative distance as an axis size, which a trace can keep variable.

    transformers creates a tensor for this distance and branches on the tensor's value, and a trace cannot follow such a branch.
    """
    longest = torch.sym_max(query.shape[-2], key.shape[-2])  # type: ignore[no-untyped-call]
    return torch.sym_min(longest, farthest)  # type: ignore[no-untyped-call]


class Deberta(Family):
    """Family of the first version of DeBERTa."""

    def replacements(self, model: Any) -> list[Replacement]:
        """Replace transformers' function that computes the largest relative distance."""
        from transformers.models.deberta import modeling_deberta

        return [(modeling_deberta, "compute_attention_span", _span)]


FAMILY = Deberta()
