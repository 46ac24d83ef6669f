"""DPR: a call without a mask attends to the tokens that are not padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..interfaces.family import Family

if TYPE_CHECKING:
    import torch


class DPR(Family):
    """DPR's encoders and reader."""

    def default_mask(self, ids: torch.Tensor, config: Any) -> torch.Tensor:
        """The tokens that are not padding."""
        return ids.ne(config.pad_token_id).long()


FAMILY = DPR()
