"""Masks of what is at given points of an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..capture.generation_graphs import family_parts
from ..interfaces.task import Task
from ..models.masks import ORTModelForMaskGeneration


class MaskGeneration(Task):
    """Masks of what is at given points of an image."""

    model = ORTModelForMaskGeneration

    def parts(self, source: Any, fusion: Any) -> Sequence[Any] | None:
        return family_parts(source)
