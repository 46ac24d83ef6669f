"""Models that read each image as tiles of one size (Idefics3, SmolVLM): `pixel_values: (batch, tiles, channels, height, width)`."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InputError

_KINDS = frozenset(("idefics3", "smolvlm"))


def reads_tiles(config: Any) -> bool:
    """Whether a model's images are tiles, several a row of the batch, and rows with fewer filled up with empty ones."""
    return getattr(config, "model_type", None) in _KINDS


def tile_features(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """What a model makes of one tile `(1, channels, height, width)` without padding: `(1, tokens, hidden)`.

    The model's own code finds the tiles that are not empty first, which no trace can follow.
    """
    inner = model.model
    found: torch.Tensor = inner.connector(inner.vision_model(pixel_values=pixels).last_hidden_state)
    return found


def whole_tiles(pixels: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
    """The tiles of a batch that are not empty, in their order, and whether none of them is padded.

    Args:
        pixels: `(batch, tiles, channels, height, width)`; a tile of zeros is none.
        mask: `(batch, tiles, height, width)`, 0 for padding; no padding when `None`.

    Raises:
        InputError: A mask of other tiles.
    """
    if mask is not None and mask.shape != (*pixels.shape[:2], *pixels.shape[3:]):
        raise InputError(
            f"pixel_attention_mask is {tuple(mask.shape)}, and pixel_values are {tuple(pixels.shape)}.",
            fix="make both with one call of the model's processor, or leave the mask out where no tile is padded.",
        )
    tiles = pixels.flatten(0, 1)
    there = (tiles != 0).flatten(1).any(1)
    return tiles[there], mask is None or bool(mask.flatten(0, 1)[there].all())
