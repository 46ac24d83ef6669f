"""Matchers of keypoints in a form that a trace can follow: as many points as an image has.

SuperPoint keeps the points of an image whose score is above a threshold, another number for each image, and transformers collects
them image by image. LightGlue stops at a layer, and drops points on the way, by what it finds in a pair. In a trace the points of all
images are chosen at once, as many as the image with most of them has, and all of LightGlue's layers compute all points, of which
those that it would have dropped are masked. The answers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..interfaces.wrapper import Tensors, Wrapper


class KeypointMatcher(Wrapper):
    """A model that matches the keypoints of two images. Outside of a trace it is the model itself.

    Returns `matches`, `matching_scores` and `mask: (batch, 2, points)`, and `keypoints: (batch, 2, points, 2)`; EfficientLoFTR, whose
    points are a grid, has no mask. Where no image has a point, a trace has one, and the mask says that it is none.

    A LightGlue reads each pair of a batch by itself. In transformers (5.23) a batch in which pairs stop at different layers fails or
    comes back in another order, and points that one pair drops move those of others. The score of what it finds no match for is 0.
    """

    def forward(self, pixel_values: torch.Tensor) -> Tensors:
        """Match `(batch, 2, channels, height, width)`."""
        model, inner = self.model, self.unwrapped
        kind = getattr(inner.config, "model_type", "")
        if kind not in ("superglue", "lightglue"):
            found = model(pixel_values=pixel_values)
        elif torch.compiler.is_exporting():
            found = _traceable(inner, pixel_values, adaptive=kind == "lightglue")
        elif kind == "lightglue":
            return _together([_cleared(inner(pixel_values=pair[None])) for pair in pixel_values])
        else:
            found = model(pixel_values=pixel_values)
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _cleared(found: Any) -> Tensors:
    """One pair's answer in its documented shapes, without matches of what fills up an image with fewer points."""
    mask = found.mask
    matches = found.matches.reshape(mask.shape).masked_fill(mask == 0, -1)
    scores = found.matching_scores.reshape(mask.shape).masked_fill(matches < 0, 0.0)
    return {"matches": matches, "matching_scores": scores, "keypoints": found.keypoints, "mask": mask}


def _together(pairs: list[Tensors]) -> Tensors:
    """The answers of one batch, filled up to the pair with most points."""
    points = max(pair["mask"].shape[2] for pair in pairs)

    def filled(name: str, value: float) -> torch.Tensor:
        tensors = [pair[name] for pair in pairs]
        whole = tensors[0].new_full((len(tensors), 2, points, *tensors[0].shape[3:]), value)
        for row, tensor in zip(whole, tensors, strict=True):
            row[:, : tensor.shape[2]] = tensor[0]
        return whole

    return {name: filled(name, -1 if name == "matches" else 0) for name in pairs[0]}


def _traceable(model: Any, pixel_values: torch.Tensor, *, adaptive: bool) -> Tensors:
    """What a SuperGlue or a LightGlue answers."""
    batch, _, channels, height, width = pixel_values.shape
    detected = _detect(model.keypoint_detector, pixel_values.reshape(batch * 2, channels, height, width))
    keypoints, scores, descriptors, mask = (one.reshape(batch, 2, *one.shape[1:]) for one in detected)
    places = keypoints * torch.tensor([width, height], dtype=keypoints.dtype, device=keypoints.device)
    if adaptive:
        with _plain_attention(model):
            matches, sure = _match(model, places, descriptors, height, width, mask)
    else:
        matches, sure, *_ = model._match_image_pair(places, descriptors, scores, height, width, mask=mask)
    return {"matches": matches, "matching_scores": sure, "keypoints": keypoints, "mask": mask}


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """Attention written out, which does not ask whether there is more than one point."""
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _detect(detector: Any, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a SuperPoint finds: points `(images, points, 2)` as shares of the image, their scores `(images, points)`, descriptors
    `(images, points, channels)` and a mask `(images, points)`.

    An image's points stand in the order of its rows where it has no more than it may keep, and else by their scores.
    """
    decoder, described = detector.keypoint_decoder, detector.descriptor_decoder
    height, width = pixel_values.shape[-2:]
    hidden = detector.encoder(detector.extract_one_channel_pixel_values(pixel_values))[0]
    scores = decoder._get_pixel_scores(hidden)
    rows, columns = scores.shape[-2:]
    row = torch.arange(rows, device=scores.device)[:, None]
    column = torch.arange(columns, device=scores.device)[None]
    border = decoder.border_removal_distance
    # transformers (5.23) multiplies the sizes of this map by 8, though they are the image's: the lower and right borders stay.
    inside = (row >= border) & (row < 8 * rows - border) & (column >= border) & (column < 8 * columns - border)
    kept = ((scores > decoder.keypoint_threshold) & inside).flatten(1)
    scores = scores.flatten(1)
    limit = decoder.max_keypoints if 0 <= decoder.max_keypoints < rows * columns else rows * columns
    counts = kept.sum(1)
    numbers = counts.clamp(max=limit)
    points = numbers.max().clamp(min=1).item()
    torch._check(points >= 1)  # type: ignore[no-untyped-call]
    torch._check(points <= rows * columns)  # type: ignore[no-untyped-call]
    earliest = torch.arange(rows * columns, 0, -1, device=scores.device)
    chosen = torch.where(kept, earliest, 0).topk(points, dim=1).indices
    if limit < rows * columns:
        best = torch.where(kept, scores, -1.0).topk(points, dim=1).indices
        chosen = torch.where(counts[:, None] > limit, best, chosen)
    mask = torch.arange(points, device=scores.device)[None] < numbers[:, None]
    there = mask.to(scores.dtype)
    places = torch.stack([chosen % columns, chosen // columns], dim=-1).to(scores.dtype)
    maps = described.conv_descriptor_b(described.relu(described.conv_descriptor_a(hidden)))
    maps = torch.nn.functional.normalize(maps, p=2, dim=1)
    descriptors = described._sample_descriptors(places, maps, 8).transpose(1, 2)
    size = torch.tensor([width, height], dtype=scores.dtype, device=scores.device)
    return (
        places * there[..., None] / size,
        scores.gather(1, chosen) * there,
        descriptors * there[..., None],
        mask.to(torch.int32),
    )


def _match(
    matcher: Any, keypoints: torch.Tensor, descriptors: torch.Tensor, height: int, width: int, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A LightGlue's matches and their scores, `(batch, 2, points)`, of points in pixels `(batch, 2, points, 2)`, their descriptors
    `(batch, 2, points, channels)` and mask `(batch, 2, points)`.
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
        found, sure = (
            one.reshape(pairs, 2, points)
            for one in matcher._get_keypoint_matching(descriptors, alive.to(torch.int32), index)
        )
        left = alive.reshape(pairs, 2, points)
        if adaptive and index:
            # Where an image has no points left, the other's seem to match what fills it up. transformers (5.23) numbers that -1, and
            # writes it over the last point of all.
            numbers = left.sum(-1, keepdim=True)
            left = left & left.flip(1).gather(2, found.clamp(min=0)) & ~(last & (numbers < numbers.flip(1)))
        found = torch.where(left, found, -1)
        matches = torch.where(stopped, matches, found)
        scores = torch.where(stopped, scores, torch.where(found < 0, 0.0, sure))
        if final:
            break
        confidences = matcher.token_confidence[index](descriptors)
        stops = matcher._get_early_stopped_image_pairs(confidences, index, alive, num_points=total)
        stopped = stopped | stops[:, None, None]
        matchable = matcher.match_assignment_layers[index].get_matchability(descriptors)
        alive = alive & matcher._get_pruning_mask(confidences, matchable, index)
    return matches, scores
