"""Family of EfficientLoFTR, which matches points of two images without a separate keypoint detector."""

from __future__ import annotations

import copy
import sys
from types import MethodType
from typing import Any

import torch

from ..interfaces.family import Family


def _matches_by_pair(model: Any, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best matches of each image pair.

    The method of transformers (5.23) concatenates the matches of the two images along the batch axis. So a batch of several
    pairs gets the matches of other pairs.

    Args:
        model: The EfficientLoFTR model.
        scores: Scores of all pairs of points, `(batch, height 0, width 0, height 1, width 1)`.

    Returns:
        Index of the matching point in the other image, or -1, and the score of the match. Both are `(batch, 2, points)`.
    """
    config, transformers_module = model.config, sys.modules[type(model).__module__]
    mask = scores > config.coarse_matching_threshold
    mask = transformers_module.mask_border(mask, config.coarse_matching_border_removal, False).flatten(3).flatten(1, 2)
    # Compare scores and maxima in float32. On the CPU, ONNX Runtime multiplies float16 scores in float32 and may round only the maxima.
    dtype, scores = scores.dtype, scores.flatten(3).flatten(1, 2).float()
    mask = mask * (scores == scores.amax(2, keepdim=True)) * (scores == scores.amax(1, keepdim=True))
    kept_scores = scores * mask
    best_scores, indices = zip(kept_scores.max(1), kept_scores.max(2), strict=True)
    matching_scores = torch.stack(best_scores, dim=1)
    return torch.where(matching_scores > 0, torch.stack(indices, dim=1), -1), matching_scores.to(dtype)


def _refined_by_pair(
    model: Any,
    indices: torch.Tensor,
    matches: torch.Tensor,
    confidence: torch.Tensor,
    window_size: int,
    scale: float,
) -> torch.Tensor:
    """Return the refined keypoints of each image pair, `(batch, 2, points, 2)`.

    The method of transformers (5.23) moves the keypoints of all pairs by the offsets of the first pair. So this function passes the
    points of all pairs as one pair.

    Args:
        model: The EfficientLoFTR model.
        indices: Index of each keypoint in its window, `(batch, 2, points, 1)`.
        matches: Keypoints before the refinement, `(batch, 2, points, 2)`.
        confidence: Confidence of each pair of positions in the two windows, `(batch, points, positions 0, positions 1)`.
        window_size: Number of positions in a window of the first image.
        scale: Size of one position in pixels.
    """
    refined = type(model)._get_second_stage_fine_matching(
        model,
        indices.transpose(0, 1).flatten(1, 2)[None],
        matches.transpose(0, 1).flatten(1, 2)[None],
        confidence.flatten(0, 1)[None],
        window_size,
        scale,
    )
    keypoints: torch.Tensor = refined[0].unflatten(1, matches.shape[::2]).transpose(0, 1)
    return keypoints


class EfficientLoFTR(Family):
    """Family of EfficientLoFTR."""

    def traced_module(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a copy of the model that shares its weights, and matches each image pair of a batch independently."""
        if not hasattr(model, "_get_matches_from_scores"):
            return model
        corrected: Any = copy.copy(model)
        corrected._get_matches_from_scores = MethodType(_matches_by_pair, corrected)
        corrected._get_second_stage_fine_matching = MethodType(_refined_by_pair, corrected)
        module: torch.nn.Module = corrected
        return module


FAMILY = EfficientLoFTR()
