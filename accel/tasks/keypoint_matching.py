"""Task `keypoint-matching`: matching keypoints of two images."""

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
    """Output of a keypoint matching model; an image processor's `post_process_keypoint_matching` converts it to pixel coordinates.

    Attributes:
        matches: Index of the matching keypoint in the other image, -1 for none: `(batch, 2, keypoints)`.
        matching_scores: Scores of the matches, `(batch, 2, keypoints)`.
        keypoints: x and y as fractions of the image size, `(batch, 2, keypoints, 2)`.
        mask: 0 for padding keypoints of the image with fewer keypoints, `(batch, 2, keypoints)`; only SuperGlue and LightGlue.
    """

    matches: torch.Tensor | None = None
    matching_scores: torch.Tensor | None = None
    keypoints: torch.Tensor | None = None
    mask: torch.Tensor | None = None


class ORTModelForKeypointMatching(ImageModel):
    """Model that matches keypoints of two images.

    It maps `pixel_values: (batch, 2, channels, height, width)` to `matches: (batch, 2, keypoints)`.
    """

    task = "keypoint-matching"
    output_class = KeypointMatchingOutput

    def forward(self, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on floating-point image pairs `(batch, 2, channels, height, width)`."""
        output = super().forward(pixel_values, **inputs)
        named = dict(zip(self.output_names, output, strict=True)) if isinstance(output, tuple) else dict(output)
        mask = named.get("mask")
        if mask is None or mask.shape[-1] != 1 or mask.any():
            return output
        # If no image has keypoints, the graph returns one padding keypoint; remove it, so that the result is empty as in transformers.
        none = {name: value[:, :, :0] for name, value in named.items()}
        return tuple(none.values()) if isinstance(output, tuple) else type(output)(**none)


class KeypointMatching(Task):
    """The task `keypoint-matching`: matching keypoints of two images."""

    model = ORTModelForKeypointMatching

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return pair_sample(module, folder)

    def tiny_batch(self, config: Any, rows: int, draw: torch.Generator, texts: Any) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.rand((rows, 2, 3, 64, 96), generator=draw)}
