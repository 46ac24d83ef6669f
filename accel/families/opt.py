"""Family of OPT, whose position ids count the tokens with 1 in the attention mask."""

from __future__ import annotations

from ..interfaces.family import Family


class OPT(Family):
    """Family of OPT."""

    positions = "mask"


FAMILY = OPT()
