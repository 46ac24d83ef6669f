"""Images as patches that contain their row and column (Pix2Struct): any number of patches, for images of any shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

PATCHES = "flattened_patches"
"""Input name. `(batch, patches, 2 + values of a patch)`: row, column, values. Padding after the last patch is zero."""

PATCH_AXIS = "patches"

USUAL_PATCHES = 2048
"""Default number of patches of Pix2Struct's processor."""

# Numbers of patches of the reference cases, different from the trace's sample.
_COUNTS = (3, 40, 17, 5, 1)


def drawn_patches(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draw random patches `(batch, patches, 2 + values of a patch)`, row by row of a grid.

    The number of columns differs by one between neighboring images. Rows and columns count from 1, as in processors; 0 marks
    padding.
    """
    images, count, width = shape
    drawn = torch.randn((images, count, width), generator=generator)
    columns = round(count**0.5) + torch.arange(images)[:, None] % 2
    numbers = torch.arange(count)
    drawn[..., 0], drawn[..., 1] = numbers // columns + 1, numbers % columns + 1
    return drawn


def patch_sizes(sizes: Mapping[str, int], index: int) -> dict[str, int]:
    """Return a number of patches for the reference case `index`. Return an empty dict for a graph without a patch axis."""
    return {PATCH_AXIS: _COUNTS[index % len(_COUNTS)]} if PATCH_AXIS in sizes else {}
