"""Masks of what is at given points of an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..capture.mask_samples import mask_parts, mask_sample
from ..interfaces.task import Sample, Task
from ..models.masks import ORTModelForMaskGeneration


class MaskGeneration(Task):
    """Masks of what is at given points of an image."""

    model = ORTModelForMaskGeneration

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return mask_sample(module, folder)

    def parts(self, source: Any, fusion: Any) -> Sequence[Any] | None:
        return mask_parts(source)
