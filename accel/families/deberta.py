"""DeBERTa: distances between tokens count as far as the text is long."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.family import Family, Replacement


def _span(query: torch.Tensor, key: torch.Tensor, farthest: int) -> Any:
    """Return the largest distance as a size. The original makes a tensor of it and branches on its value."""
    longest = torch.sym_max(query.shape[-2], key.shape[-2])  # type: ignore[no-untyped-call]
    return torch.sym_min(longest, farthest)  # type: ignore[no-untyped-call]


class Deberta(Family):
    """The first version of DeBERTa."""

    def replacements(self, model: Any) -> list[Replacement]:
        """Compute the largest distance from sizes."""
        from transformers.models.deberta import modeling_deberta

        return [(modeling_deberta, "compute_attention_span", _span)]


FAMILY = Deberta()
