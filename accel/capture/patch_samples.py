"""Sample inputs for models that read images as a sequence of patches with their row and column, such as Pix2Struct."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

PATCHES = "flattened_patches"
"""Name of the input `(batch, patches, 2 + values of a patch)`.

Each patch consists of its row, its column and its pixel values. After the last patch of an image, the padding is zero.
"""

PATCH_AXIS = "patches"

USUAL_PATCHES = 2048
"""Default number of patches of Pix2Struct's processor."""

# Number of patches in each reference case. The sample of the trace has another number of patches.
_COUNTS = (3, 40, 17, 5, 1)


def drawn_patches(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Return random patches `(batch, patches, 2 + values of a patch)` that are ordered row by row.

    Every second image has one column more. Rows and columns are numbered from 1, as in transformers' processors, because 0 means
    padding.
    """
    images, count, width = shape
    drawn = torch.randn((images, count, width), generator=generator)
    columns = round(count**0.5) + torch.arange(images)[:, None] % 2
    numbers = torch.arange(count)
    drawn[..., 0], drawn[..., 1] = numbers // columns + 1, numbers % columns + 1
    return drawn


def patch_sizes(sizes: Mapping[str, int], index: int) -> dict[str, int]:
    """Return the number of patches for the reference case `index`, or an empty dict for a graph without a patch axis."""
    return {PATCH_AXIS: _COUNTS[index % len(_COUNTS)]} if PATCH_AXIS in sizes else {}
