"""LED: windowed attention in the encoder, and tokens with global attention."""

from __future__ import annotations

from typing import Any

from ..interfaces.family import Family, Replacement
from .windowed_attention import replacements


class LED(Family):
    """Family of LED."""

    def replacements(self, model: Any) -> list[Replacement]:
        """Return windowed attention that can be traced."""
        from transformers.models.led import modeling_led as own

        return replacements(own.LEDEncoderSelfAttention, own.LEDEncoder)


FAMILY = LED()
