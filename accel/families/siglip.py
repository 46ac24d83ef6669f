"""Family of SigLIP, which was trained with texts padded to a fixed length."""

from __future__ import annotations

from ..interfaces.family import Family


class Siglip(Family):
    """Family of SigLIP and SigLIP 2."""

    fixed_text_length = 64


FAMILY = Siglip()
