"""OPT: positions count what the mask shows."""

from __future__ import annotations

from ..interfaces.family import Family


class OPT(Family):
    """OPT."""

    positions = "mask"


FAMILY = OPT()
