"""Idefics3 and SmolVLM: an image is split into several tiles of one size."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.family import Family


class Idefics3(Family):
    """Family of Idefics3 and SmolVLM."""

    tiles = True

    def image_features(self, model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
        """Embed one tile without padding. transformers first searches for non-empty tiles, which cannot be traced."""
        inner = model.model
        found: torch.Tensor = inner.connector(inner.vision_model(pixel_values=pixel_values).last_hidden_state)
        return found.flatten(0, -2)


FAMILY = Idefics3()
