"""Family of RoBERTa and related models.

Their position ids count the tokens that are not padding tokens, and start after `padding_idx`. They do not depend on the attention
mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..interfaces.family import Family


class Roberta(Family):
    """Family of CamemBERT, Data2Vec's text models, RoBERTa, RoBERTa-PreLayerNorm, XLM-RoBERTa and XLM-RoBERTa-XL."""

    positions = "tokens"

    def first_position(self, config: Mapping[str, Any]) -> int:
        """Return the first position id, which is `padding_idx + 1`."""
        padding = config.get("pad_token_id")
        return (padding if isinstance(padding, int) else 1) + 1


FAMILY = Roberta()
