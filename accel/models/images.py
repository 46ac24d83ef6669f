"""Models of images: objects, segments, depths, other images, and images beside texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import modeling_outputs
from transformers.utils import ModelOutput

from ..errors import InputError, TaskError
from .base import ORTModel


@dataclass
class ImageTextOutput(ModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """What a model of images and texts returns.

    Attributes:
        logits_per_image: `(batch, texts)`
        logits_per_text: `(texts, batch)`
        image_embeds: `(batch, projection)`
        text_embeds: `(texts, projection)`
    """

    logits_per_image: torch.Tensor | None = None
    logits_per_text: torch.Tensor | None = None
    image_embeds: torch.Tensor | None = None
    text_embeds: torch.Tensor | None = None


@dataclass
class ObjectDetectionOutput(ModelOutput):  # type: ignore[misc]
    """What a detector returns; an image processor's `post_process_object_detection` turns it into boxes in pixels.

    Attributes:
        logits: `(batch, queries, classes)`
        pred_boxes: `(batch, queries, 4)`: centre, width and height, as shares of the image.
        order_logits: `(batch, queries, queries)`, of models of page layouts: which region is read before which.
        out_masks: `(batch, queries, height / 4, width / 4)`, of such models.
        objectness_logits: `(batch, queries)`, of OWLv2: whether there is an object at all.
    """

    logits: torch.Tensor | None = None
    pred_boxes: torch.Tensor | None = None
    order_logits: torch.Tensor | None = None
    out_masks: torch.Tensor | None = None
    objectness_logits: torch.Tensor | None = None


@dataclass
class ImageSegmentationOutput(ModelOutput):  # type: ignore[misc]
    """What a model returns that answers with a class and a mask for each of its queries.

    Attributes:
        logits: `(batch, queries, classes)`, of DETR.
        pred_boxes: `(batch, queries, 4)`, of DETR.
        pred_masks: `(batch, queries, height / 4, width / 4)`, of DETR.
        class_queries_logits: `(batch, queries, classes)`, of MaskFormer and its kind.
        masks_queries_logits: `(batch, queries, height / 4, width / 4)`, of these.
    """

    logits: torch.Tensor | None = None
    pred_boxes: torch.Tensor | None = None
    pred_masks: torch.Tensor | None = None
    class_queries_logits: torch.Tensor | None = None
    masks_queries_logits: torch.Tensor | None = None


class _ImageModel(ORTModel):
    """What models of images share: the signature that pipelines read."""

    def forward(self, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on `(batch, channels, height, width)` floating-point images."""
        return self._run({"pixel_values": pixel_values, **inputs})


class ORTModelForZeroShotImageClassification(ORTModel):
    """Images compared with texts: `logits_per_image: (batch, texts)`."""

    task = "zero-shot-image-classification"

    def forward(self, input_ids: Any = None, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on `input_ids: (texts, sequence)` and `pixel_values: (batch, channels, height, width)`."""
        return self._run({"input_ids": input_ids, "pixel_values": pixel_values, **inputs})

    def _choose_output(self, names: Sequence[str]) -> Any:
        super()._choose_output(names)
        return ImageTextOutput


class ORTModelForObjectDetection(_ImageModel):
    """Objects in images: `logits: (batch, queries, classes)` and `pred_boxes: (batch, queries, 4)`."""

    task = "object-detection"

    def _choose_output(self, names: Sequence[str]) -> Any:
        super()._choose_output(names)
        return ObjectDetectionOutput


class ORTModelForZeroShotObjectDetection(ORTModel):
    """Objects that texts name: `logits: (batch, queries, texts of an image)` and `pred_boxes: (batch, queries, 4)`.

    Grounding DINO reads one text an image, of which it scores each token: `logits: (batch, queries, max_text_len)`.
    """

    task = "zero-shot-object-detection"

    def forward(self, input_ids: Any = None, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on `pixel_values: (batch, channels, height, width)` and `input_ids: (texts, sequence)`: as many texts
        for each image, those of the first image before those of the second.

        Raises:
            InputError: Images that cannot have as many texts each.
        """
        images, texts = (len(one) if getattr(one, "ndim", 0) else 0 for one in (pixel_values, input_ids))
        if images and texts % images:
            raise InputError(
                f"{texts} texts came for {images} images; each image has as many.",
                fix="repeat the texts for each image, as the processor does: processor(text=[[...], ...], images=[...]).",
            )
        return self._run({"input_ids": input_ids, "pixel_values": pixel_values, **inputs})

    def _choose_output(self, names: Sequence[str]) -> Any:
        super()._choose_output(names)
        return ObjectDetectionOutput


class ORTModelForImageSegmentation(_ImageModel):
    """Classes of pixels (`logits: (batch, num_labels, height, width)`), or of queries with a mask each."""

    task = "image-segmentation"

    def _choose_output(self, names: Sequence[str]) -> Any:
        if {"pred_masks", "masks_queries_logits"} & set(names):
            return ImageSegmentationOutput
        if "logits" not in names:
            raise TaskError(
                f"The graph in {self.artifact.path} returns {', '.join(names)}, and no masks.",
                fix="use the class that the model was exported for.",
            )
        return modeling_outputs.SemanticSegmenterOutput


ORTModelForSemanticSegmentation = ORTModelForImageSegmentation
"""The name that Optimum gives it."""


@dataclass
class KeypointMatchingOutput(ModelOutput):  # type: ignore[misc]
    """What a model of pairs returns; an image processor's `post_process_keypoint_matching` turns it into points in pixels.

    Attributes:
        matches: `(batch, 2, keypoints)`: the keypoint of the other image that each one is, -1 for none.
        matching_scores: `(batch, 2, keypoints)`
        keypoints: `(batch, 2, keypoints, 2)`: x and y, as shares of the image.
        mask: `(batch, 2, keypoints)`: which keypoints are none but fill up the image with fewer, of SuperGlue and LightGlue.
    """

    matches: torch.Tensor | None = None
    matching_scores: torch.Tensor | None = None
    keypoints: torch.Tensor | None = None
    mask: torch.Tensor | None = None


class ORTModelForKeypointMatching(_ImageModel):
    """Points that two images have in common: `pixel_values: (batch, 2, channels, height, width)` to `matches: (batch, 2, keypoints)`."""

    task = "keypoint-matching"

    def forward(self, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on `(batch, 2, channels, height, width)` floating-point pairs of images."""
        found = super().forward(pixel_values, **inputs)
        named = dict(zip(self.output_names, found, strict=True)) if isinstance(found, tuple) else dict(found)
        mask = named.get("mask")
        if mask is None or mask.shape[-1] != 1 or mask.any():
            return found
        # A graph has a point where no image has any.
        none = {name: value[:, :, :0] for name, value in named.items()}
        return tuple(none.values()) if isinstance(found, tuple) else type(found)(**none)

    def _choose_output(self, names: Sequence[str]) -> Any:
        super()._choose_output(names)
        return KeypointMatchingOutput


class ORTModelForDepthEstimation(_ImageModel):
    """How far away each pixel is: `predicted_depth: (batch, height, width)`."""

    task = "depth-estimation"


class ORTModelForImageToImage(_ImageModel):
    """Images made of images, such as larger ones: `reconstruction: (batch, channels, height, width)`."""

    task = "image-to-image"
