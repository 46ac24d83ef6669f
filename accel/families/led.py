"""LED: windows of attention in the encoder, and tokens that see all."""

from __future__ import annotations

from typing import Any

from ..interfaces.family import Family, Replacement
from .windowed_attention import replacements


class LED(Family):
    """LED."""

    def replacements(self, model: Any) -> list[Replacement]:
        """Attention that a trace can follow."""
        from transformers.models.led import modeling_led as own

        return replacements(own.LEDEncoderSelfAttention, own.LEDEncoder)


FAMILY = LED()
