"""Family of XLM and FlauBERT.

If a call has no attention mask, the PyTorch model attends to the first n tokens. n is the number of tokens that are not padding.
"""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.family import Family


class XLM(Family):
    """Family of XLM and FlauBERT."""

    def default_mask(self, ids: torch.Tensor, config: Any) -> torch.Tensor:
        """Return a mask with 1 for the first n tokens. n is the number of tokens that are not padding."""
        count: torch.Tensor = (ids != config.pad_index).sum(dim=-1, keepdim=True)
        return torch.arange(ids.shape[-1], device=ids.device).lt(count).long()


FAMILY = XLM()
