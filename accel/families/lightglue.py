"""Family of LightGlue, which matches the keypoints of two images with an adaptive number of layers.

LightGlue decides for each pair of images after which layer it stops, and which keypoints it drops. In a trace, all layers process
all keypoints, and keypoints that LightGlue would drop are masked. The results are the same as in transformers.
"""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.family import Family
from ..interfaces.tracing_wrapper import Tensors, unwrapped
from ..upstream.attention_choice import attention_of
from .keypoint_matchers import KeypointMatcher


class LightGlueMatcher(KeypointMatcher):
    """A LightGlue model that processes each pair of images in a batch independently.

    In transformers (5.23), a batch fails or returns its pairs in the wrong order if the pairs stop at different layers. Keypoints
    that one pair drops also shift the keypoints of other pairs. This class avoids both errors. It returns the score 0 for a
    keypoint without a match.
    """

    def answers(self, pixel_values: torch.Tensor) -> Any:
        """Run the PyTorch model once for each pair of images, and join the results."""
        return _together([_cleared(self.model(pixel_values=pair[None])) for pair in pixel_values])

    def match(
        self,
        keypoints: torch.Tensor,
        descriptors: torch.Tensor,
        scores: torch.Tensor,
        height: int,
        width: int,
        mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Match the keypoints in a way that can be traced. All layers process all keypoints."""
        # Attention implementations other than eager branch on the number of keypoints, which a trace cannot follow.
        with attention_of(unwrapped(self), "eager"):
            return _match(unwrapped(self), keypoints, descriptors, height, width, mask)


class LightGlue(Family):
    """Family of LightGlue."""

    def traced_module(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the model so that a trace computes all pairs of a batch at once."""
        return LightGlueMatcher(model) if hasattr(model, "_keypoint_processing") else model


def _cleared(output: Any) -> Tensors:
    """Return the outputs for one pair of images in the shapes that transformers documents, without matches of padding."""
    mask = output.mask
    matches = output.matches.reshape(mask.shape).masked_fill(mask == 0, -1)
    scores = output.matching_scores.reshape(mask.shape).masked_fill(matches < 0, 0.0)
    return {"matches": matches, "matching_scores": scores, "keypoints": output.keypoints, "mask": mask}


def _together(pairs: list[Tensors]) -> Tensors:
    """Join the outputs of several pairs of images into a batch. Pairs with fewer keypoints are padded."""
    points = max(pair["mask"].shape[2] for pair in pairs)

    def filled(name: str, value: float) -> torch.Tensor:
        tensors = [pair[name] for pair in pairs]
        batch = tensors[0].new_full((len(tensors), 2, points, *tensors[0].shape[3:]), value)
        for row, tensor in zip(batch, tensors, strict=True):
            row[:, : tensor.shape[2]] = tensor[0]
        return batch

    return {name: filled(name, -1 if name == "matches" else 0) for name in pairs[0]}


def _match(
    matcher: Any, keypoints: torch.Tensor, descriptors: torch.Tensor, height: int, width: int, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return LightGlue's matches and their scores, `(batch, 2, points)` each.

    The arguments are keypoints in pixels `(batch, 2, points, 2)`, their descriptors `(batch, 2, points, channels)`, and their
    mask `(batch, 2, points)`.
    """
    from transformers.masking_utils import create_bidirectional_mask
    from transformers.models.lightglue.modeling_lightglue import normalize_keypoints

    adaptive = matcher.depth_confidence > 0 and matcher.width_confidence > 0
    pairs, _, points, _ = keypoints.shape
    keypoints = normalize_keypoints(keypoints.reshape(pairs * 2, points, 2), height, width)
    descriptors, (positions, *_) = matcher._keypoint_processing(
        descriptors.reshape(pairs * 2, points, matcher.keypoint_detector_descriptor_dim), keypoints
    )
    alive = mask.reshape(pairs * 2, points) > 0
    counts = alive.reshape(pairs, 2, points).sum(-1)
    total = counts.sum(1)
    last = torch.arange(points, device=alive.device) == counts.max(1).values[:, None, None] - 1
    stopped = torch.zeros((pairs, 1, 1), dtype=torch.bool, device=alive.device)
    matches = torch.full((pairs, 2, points), -1, dtype=torch.int64, device=alive.device)
    scores = torch.zeros((pairs, 2, points), dtype=descriptors.dtype, device=alive.device)
    for index, layer in enumerate(matcher.transformer_layers):
        attended = create_bidirectional_mask(
            config=matcher.config,
            inputs_embeds=descriptors[:, 0:1, :],
            attention_mask=alive,
            allow_is_bidirectional_skip=False,
        )
        descriptors = layer(descriptors, positions, attention_mask=attended)[0]
        final = index == matcher.num_layers - 1
        if not (adaptive or final):
            continue
        partners, sure = (
            values.reshape(pairs, 2, points)
            for values in matcher._get_keypoint_matching(descriptors, alive.to(torch.int32), index)
        )
        left = alive.reshape(pairs, 2, points)
        if adaptive and index:
            # This line reproduces transformers (5.23): if one image has no keypoints left, keypoints of the other image match padding,
            # which has the index -1. The match of the padding overwrites the match of the last keypoint.
            numbers = left.sum(-1, keepdim=True)
            left = left & left.flip(1).gather(2, partners.clamp(min=0)) & ~(last & (numbers < numbers.flip(1)))
        partners = torch.where(left, partners, -1)
        matches = torch.where(stopped, matches, partners)
        scores = torch.where(stopped, scores, torch.where(partners < 0, 0.0, sure))
        if final:
            break
        confidences = matcher.token_confidence[index](descriptors)
        stops = matcher._get_early_stopped_image_pairs(confidences, index, alive, num_points=total)
        stopped = stopped | stops[:, None, None]
        matchable = matcher.match_assignment_layers[index].get_matchability(descriptors)
        alive = alive & matcher._get_pruning_mask(confidences, matchable, index)
    return matches, scores


FAMILY = LightGlue()
