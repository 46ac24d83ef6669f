"""FocalNet: images are padded to whole patches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..interfaces.family import Family, Replacement


def _pad_to_patches(patch_size: Sequence[int], pixel_values: torch.Tensor, height: Any, width: Any) -> torch.Tensor:
    """Pad images `(batch, channels, height, width)` with zeros on the right and at the bottom, up to whole patches."""
    tall, wide = (size * ((n + size - 1) // size) - n for n, size in zip((height, width), patch_size, strict=True))
    return torch.nn.functional.pad(pixel_values, (0, wide, 0, tall))


class FocalNet(Family):
    """Family of FocalNet."""

    def replacements(self, model: Any) -> list[Replacement]:
        """Pad in every call. transformers pads only if needed, and a trace would fix what its sample needed."""
        layers = [layer for layer in model.modules() if hasattr(layer, "maybe_pad")]
        return [(layer, "maybe_pad", partial(_pad_to_patches, layer.patch_size)) for layer in layers]


FAMILY = FocalNet()
