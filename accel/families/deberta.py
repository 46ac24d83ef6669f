"""DeBERTa: the range of relative positions depends on the text's length."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.family import Family, Replacement


def _span(query: torch.Tensor, key: torch.Tensor, farthest: int) -> Any:
    """Return the largest distance as a size. transformers creates a tensor from it and branches on the tensor's value."""
    longest = torch.sym_max(query.shape[-2], key.shape[-2])  # type: ignore[no-untyped-call]
    return torch.sym_min(longest, farthest)  # type: ignore[no-untyped-call]


class Deberta(Family):
    """Family of the first version of DeBERTa."""

    def replacements(self, model: Any) -> list[Replacement]:
        """Compute the largest distance from axis sizes."""
        from transformers.models.deberta import modeling_deberta

        return [(modeling_deberta, "compute_attention_span", _span)]


FAMILY = Deberta()
