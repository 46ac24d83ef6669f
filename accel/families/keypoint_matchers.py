"""Wrapper of models that match SuperPoint keypoints, so that the models can be traced.

SuperPoint keeps the keypoints of an image whose score is above a threshold. The number of keypoints differs between images, and
transformers collects them in a loop over the images. In a trace, this module selects the keypoints of all images at once, and
pads each image to the largest number of keypoints. The results are the same as in transformers.
"""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.tracing_wrapper import Wrapper, unwrapped


class KeypointMatcher(Wrapper):
    """A model that matches the keypoints of two images. Outside of a trace, the wrapper runs the original PyTorch model.

    The outputs are `matches`, `matching_scores` and `mask` of shape `(batch, 2, points)`, and `keypoints: (batch, 2, points, 2)`. If
    no image has a keypoint, the graph returns one keypoint per image, and the mask marks this keypoint as padding.
    """

    @property
    def returns_layers(self) -> bool:
        """Always False: a traced model cannot return the hidden states and attentions of its layers."""
        return False

    def forward(self, pixel_values: torch.Tensor) -> Any:
        """Match the keypoints of image pairs `(batch, 2, channels, height, width)`."""
        if not torch.compiler.is_exporting():
            return self.answers(pixel_values)
        inner: Any = unwrapped(self)
        batch, _, channels, height, width = pixel_values.shape
        detections = detect(inner.keypoint_detector, pixel_values.reshape(batch * 2, channels, height, width))
        keypoints, scores, descriptors, mask = (tensor.reshape(batch, 2, *tensor.shape[1:]) for tensor in detections)
        places = keypoints * torch.tensor([width, height], dtype=keypoints.dtype, device=keypoints.device)
        matches, sure = self.match(places, descriptors, scores, height, width, mask)
        return {"matches": matches, "matching_scores": sure, "keypoints": keypoints, "mask": mask}

    def answers(self, pixel_values: torch.Tensor) -> Any:
        """Run the PyTorch model."""
        return self.model(pixel_values=pixel_values)

    def match(
        self,
        keypoints: torch.Tensor,
        descriptors: torch.Tensor,
        scores: torch.Tensor,
        height: int,
        width: int,
        mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matches and their scores, `(batch, 2, points)` each.

        Args:
            keypoints: Keypoints in pixels, `(batch, 2, points, 2)`.
            descriptors: Descriptors of the keypoints, `(batch, 2, points, channels)`.
            scores, mask: Scores and padding mask of the keypoints, `(batch, 2, points)`.
            height, width: Size of the images in pixels.
        """
        matches, sure, *_ = unwrapped(self)._match_image_pair(keypoints, descriptors, scores, height, width, mask=mask)
        return matches, sure


def detect(detector: Any, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Detect the keypoints of images.

    The keypoints of an image are ordered by image row. If an image has more keypoints than `max_keypoints`, the keypoints with the
    highest scores are returned, ordered by score.

    Returns:
        Keypoints `(images, points, 2)` as fractions of the image, scores `(images, points)`, descriptors
        `(images, points, channels)` and a mask `(images, points)`.
    """
    decoder, described = detector.keypoint_decoder, detector.descriptor_decoder
    height, width = pixel_values.shape[-2:]
    hidden = detector.encoder(detector.extract_one_channel_pixel_values(pixel_values))[0]
    scores = decoder._get_pixel_scores(hidden)
    rows, columns = scores.shape[-2:]
    row = torch.arange(rows, device=scores.device)[:, None]
    column = torch.arange(columns, device=scores.device)[None]
    border = decoder.border_removal_distance
    # transformers (5.23) multiplies the sizes of the score map by 8, although the map has the size of the image. So it does not remove
    # keypoints at the bottom and right border. This code computes the same result.
    inside = (row >= border) & (row < 8 * rows - border) & (column >= border) & (column < 8 * columns - border)
    selected = ((scores > decoder.keypoint_threshold) & inside).flatten(1)
    scores = scores.flatten(1)
    limit = decoder.max_keypoints if 0 <= decoder.max_keypoints < rows * columns else rows * columns
    counts = selected.sum(1)
    numbers = counts.clamp(max=limit)
    points = numbers.max().clamp(min=1).item()
    torch._check(points >= 1)  # type: ignore[no-untyped-call]
    torch._check(points <= rows * columns)  # type: ignore[no-untyped-call]
    earliest = torch.arange(rows * columns, 0, -1, device=scores.device)
    chosen = torch.where(selected, earliest, 0).topk(points, dim=1).indices
    if limit < rows * columns:
        best = torch.where(selected, scores, -1.0).topk(points, dim=1).indices
        chosen = torch.where(counts[:, None] > limit, best, chosen)
    mask = torch.arange(points, device=scores.device)[None] < numbers[:, None]
    present = mask.to(scores.dtype)
    places = torch.stack([chosen % columns, chosen // columns], dim=-1).to(scores.dtype)
    maps = described.conv_descriptor_b(described.relu(described.conv_descriptor_a(hidden)))
    maps = torch.nn.functional.normalize(maps, p=2, dim=1)
    descriptors = described._sample_descriptors(places, maps, 8).transpose(1, 2)
    size = torch.tensor([width, height], dtype=scores.dtype, device=scores.device)
    return (
        places * present[..., None] / size,
        scores.gather(1, chosen) * present,
        descriptors * present[..., None],
        mask.to(torch.int32),
    )
