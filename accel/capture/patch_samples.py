"""Images as patches that say themselves where they stand, which Pix2Struct reads: any number of them, of images of any shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

PATCHES = "flattened_patches"
"""`(batch, patches, 2 + values of a patch)`: row, column, values; zeros behind the last patch of an image."""

PATCH_AXIS = "patches"

USUAL_PATCHES = 2048
"""What Pix2Struct's processor makes where it is not told another number."""

# Beside the sample's own number.
_COUNTS = (3, 40, 17, 5, 1)


def drawn_patches(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Patches `(batch, patches, 2 + values of a patch)` of grids that differ by a column from image to image, row by row.

    Rows and columns count from 1, as processors have it: 0 is padding.
    """
    images, count, width = shape
    drawn = torch.randn((images, count, width), generator=generator)
    columns = round(count**0.5) + torch.arange(images)[:, None] % 2
    numbers = torch.arange(count)
    drawn[..., 0], drawn[..., 1] = numbers // columns + 1, numbers % columns + 1
    return drawn


def patch_sizes(sizes: Mapping[str, int], index: int) -> dict[str, int]:
    """Another number of patches for the case `index`; nothing for a graph without such an axis."""
    return {PATCH_AXIS: _COUNTS[index % len(_COUNTS)]} if PATCH_AXIS in sizes else {}
