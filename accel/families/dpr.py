"""Family of DPR. If a call has no attention mask, the PyTorch model masks the padding tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..interfaces.family import Family

if TYPE_CHECKING:
    import torch


class DPR(Family):
    """Family of DPR's encoders and reader."""

    def default_mask(self, ids: torch.Tensor, config: Any) -> torch.Tensor:
        """Return a mask with 1 for tokens that are not padding."""
        return ids.ne(config.pad_token_id).long()


FAMILY = DPR()
