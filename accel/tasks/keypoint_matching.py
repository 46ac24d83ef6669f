"""Matching of the keypoints of two images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..capture.image_text_samples import pair_sample
from ..interfaces.task import Sample, Task
from ..models.modality_models import ImageModel


@dataclass
class KeypointMatchingOutput(ModelOutput):  # type: ignore[misc]
    """What a model of pairs returns; an image processor's `post_process_keypoint_matching` turns it into points in pixels.

    Attributes:
        matches: `(batch, 2, keypoints)`: the keypoint of the other image that each one is, -1 for none.
        matching_scores: `(batch, 2, keypoints)`
        keypoints: `(batch, 2, keypoints, 2)`: x and y, as shares of the image.
        mask: `(batch, 2, keypoints)`: which keypoints are none but fill up the image with fewer, of SuperGlue and LightGlue.
    """

    matches: torch.Tensor | None = None
    matching_scores: torch.Tensor | None = None
    keypoints: torch.Tensor | None = None
    mask: torch.Tensor | None = None


class ORTModelForKeypointMatching(ImageModel):
    """Points that two images have in common: `pixel_values: (batch, 2, channels, height, width)` to `matches: (batch, 2, keypoints)`."""

    task = "keypoint-matching"
    output_class = KeypointMatchingOutput

    def forward(self, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on `(batch, 2, channels, height, width)` floating-point pairs of images."""
        found = super().forward(pixel_values, **inputs)
        named = dict(zip(self.output_names, found, strict=True)) if isinstance(found, tuple) else dict(found)
        mask = named.get("mask")
        if mask is None or mask.shape[-1] != 1 or mask.any():
            return found
        # A graph has a point where no image has any.
        none = {name: value[:, :, :0] for name, value in named.items()}
        return tuple(none.values()) if isinstance(found, tuple) else type(found)(**none)


class KeypointMatching(Task):
    """Matching of the keypoints of two images."""

    model = ORTModelForKeypointMatching

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return pair_sample(module, folder)
