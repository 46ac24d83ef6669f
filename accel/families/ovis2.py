"""Family of Ovis2, which embeds the tokens around an image with a separate table of visual embeddings."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.family import Family


class Ovis2(Family):
    """Family of Ovis2."""

    def tokens_around_images(self, config: Any) -> list[int]:
        """Return the tokens that mark the start and the end of an image."""
        return list(config.visual_indicator_token_ids or ())

    def embeddings(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """Return token embeddings. The tokens around an image get the last rows of the visual embeddings, as in transformers."""
        embedded = super().embeddings(model, ids)
        rows = model.model.visual_embeddings_table.weight[-model.config.vision_config.num_visual_indicator_tokens :]
        for token, row in zip(self.tokens_around_images(model.config), rows, strict=False):
            embedded = torch.where((ids == token).unsqueeze(-1), row.to(embedded.dtype), embedded)
        return embedded


FAMILY = Ovis2()
