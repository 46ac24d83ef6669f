"""Family of Idefics3 and SmolVLM, whose processor splits an image into several tiles of the same size."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.family import Family


class Idefics3(Family):
    """Family of Idefics3 and SmolVLM."""

    tiles = True

    def image_features(self, model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of one tile without padding.

        transformers first selects the tiles that are not empty, and a trace cannot follow this selection.
        """
        inner = model.model
        features: torch.Tensor = inner.connector(inner.vision_model(pixel_values=pixel_values).last_hidden_state)
        return features.flatten(0, -2)


FAMILY = Idefics3()
