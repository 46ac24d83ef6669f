"""Family of VisualBERT, which reads a text and features of image regions from an object detector."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.family import Axes, Family, Sample, Tensors


class VisualBert(Family):
    """Family of VisualBERT."""

    def sample(self, model: Any, sample: Sample) -> Sample:
        """Add features of image regions `(batch, regions, features)` to the sample inputs, with a mask and token types.

        The mask is a floating-point tensor, as in transformers' documentation. All token types of regions are 1.
        """
        tensors, axes, unused = sample
        ids = tensors["input_ids"]
        if ids.ndim != 2:
            return sample
        batch, regions = ids.shape[0], ids.shape[1] + 1
        mask = torch.ones((batch, regions))
        mask[1::2, (regions + 1) // 2 :] = 0
        features = torch.randn((batch, regions, model.config.visual_embedding_dim))
        visual: Tensors = {
            "visual_embeds": features,
            "visual_attention_mask": mask,
            "visual_token_type_ids": torch.ones((batch, regions), dtype=torch.int64),
        }
        named: Axes = {name: {0: "batch", 1: "regions"} for name in visual}
        return {**tensors, **visual}, {**axes, **named}, unused


FAMILY = VisualBert()
