"""Family of FocalNet, which pads images so that their size is a multiple of the patch size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..interfaces.family import Family, Replacement


def _pad_to_patches(patch_size: Sequence[int], pixel_values: torch.Tensor, height: Any, width: Any) -> torch.Tensor:
    """Pad images `(batch, channels, height, width)` with zeros on the right and at the bottom, to a multiple of the patch size."""
    tall, wide = (size * ((n + size - 1) // size) - n for n, size in zip((height, width), patch_size, strict=True))
    return torch.nn.functional.pad(pixel_values, (0, wide, 0, tall))


class FocalNet(Family):
    """Family of FocalNet."""

    def replacements(self, model: Any) -> list[Replacement]:
        """Replace the padding function by one without a branch.

        transformers pads an image only if needed. A trace would always pad, or never pad, depending on its sample image.
        """
        layers = [layer for layer in model.modules() if hasattr(layer, "maybe_pad")]
        return [(layer, "maybe_pad", partial(_pad_to_patches, layer.patch_size)) for layer in layers]


FAMILY = FocalNet()
