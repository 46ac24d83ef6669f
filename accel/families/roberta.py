"""RoBERTa and related models: position ids count non-padding tokens, starting after `padding_idx`; the mask is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..interfaces.family import Family


class Roberta(Family):
    """Family of CamemBERT, Data2Vec's text models, RoBERTa, RoBERTa-PreLayerNorm, XLM-RoBERTa and XLM-RoBERTa-XL."""

    positions = "tokens"

    def first_position(self, config: Mapping[str, Any]) -> int:
        """Return the row of the position table after `padding_idx`."""
        padding = config.get("pad_token_id")
        return (padding if isinstance(padding, int) else 1) + 1


FAMILY = Roberta()
