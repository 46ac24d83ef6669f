"""BROS: texts with a bounding box for each token, in fractions of the page."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from ..interfaces.family import Family


class Bros(Family):
    """Family of BROS."""

    required_inputs = MappingProxyType(
        {
            "bbox": "pass bbox, a float tensor of shape (batch, sequence, 4): left, top, right and bottom of each token's word as "
            "fractions of the page, from 0 to 1."
        }
    )

    def largest_box(self, config: Any) -> float:
        """Return 1.0, because bounding boxes are fractions of the page."""
        return 1.0


FAMILY = Bros()
