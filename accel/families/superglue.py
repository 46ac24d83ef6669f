"""Family of SuperGlue, which matches the keypoints of two images."""

from __future__ import annotations

import torch

from ..interfaces.family import Family
from .keypoint_matchers import KeypointMatcher


class SuperGlue(Family):
    """Family of SuperGlue."""

    def traced_module(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the model so that a trace computes all images of a batch at once."""
        return KeypointMatcher(model) if hasattr(model, "_match_image_pair") else model


FAMILY = SuperGlue()
