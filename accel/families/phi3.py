"""Phi-3 and its kind: angles that change with the length of a text."""

from __future__ import annotations

from ..interfaces.family import Family


class Phi3(Family):
    """Phi-3, Phi-4-multimodal and PhiMoE."""

    recomputes_long_texts = True


FAMILY = Phi3()
