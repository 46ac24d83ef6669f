"""Family of Phi-3 and related models, whose rotary angles depend on the length of the text."""

from __future__ import annotations

from ..interfaces.family import Family


class Phi3(Family):
    """Family of Phi-3, Phi-4-multimodal and PhiMoE."""

    recomputes_long_texts = True


FAMILY = Phi3()
