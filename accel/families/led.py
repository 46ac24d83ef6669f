"""Family of LED, whose encoder has sliding-window attention and global attention for some tokens."""

from __future__ import annotations

from typing import Any

from ..interfaces.family import Family, Replacement
from .longformer_attention import replacements


class LED(Family):
    """Family of LED."""

    def replacements(self, model: Any) -> list[Replacement]:
        """Return a version of the sliding-window attention that can be traced."""
        from transformers.models.led import modeling_led as modeling

        return replacements(modeling.LEDEncoderSelfAttention, modeling.LEDEncoder)


FAMILY = LED()
