"""SigLIP: texts of one length, as it was trained."""

from __future__ import annotations

from ..interfaces.family import Family


class Siglip(Family):
    """SigLIP and SigLIP 2."""

    fixed_text_length = 64


FAMILY = Siglip()
