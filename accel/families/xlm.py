"""XLM and FlauBERT: a call without a mask counts the tokens that are not padding, and attends to as many from the left."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.family import Family


class XLM(Family):
    """XLM and FlauBERT."""

    def default_mask(self, ids: torch.Tensor, config: Any) -> torch.Tensor:
        """As many tokens from the left as are not padding."""
        count: torch.Tensor = (ids != config.pad_index).sum(dim=-1, keepdim=True)
        return torch.arange(ids.shape[-1], device=ids.device).lt(count).long()


FAMILY = XLM()
