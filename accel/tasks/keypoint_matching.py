"""Matching of the keypoints of two images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.image_text_samples import pair_sample
from ..interfaces.task import Sample, Task
from ..models.images import ORTModelForKeypointMatching


class KeypointMatching(Task):
    """Matching of the keypoints of two images."""

    model = ORTModelForKeypointMatching

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return pair_sample(module, folder)
