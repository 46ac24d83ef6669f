"""Family of SAM, which segments the objects at given points of an image.

SAM is exported as two graphs: an image encoder, which runs once for each image, and a mask decoder, which runs for each set of points.
"""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.family import Axes, Family, ModelPart
from ..interfaces.graph_and_tensor_names import EMBEDDINGS, IMAGE_ENCODER, INTERMEDIATE, MASK_DECODER
from ..interfaces.tracing_wrapper import Tensors, Wrapper

_MASKS, _POINTS_PER_MASK = 5, 4  # Masks per image and points per mask in the sample.
# Labels of foreground, background, exclusion and padding points.
_LABELS = (1, 0, -1, -10)


class _ImageEncoder(Wrapper):
    """Encoder of `pixel_values` to `image_embeddings: (batch, channels, height / patch, width / patch)`.

    SAM-HQ's mask decoder also reads the output of the encoder's first layer with global attention:
    `intermediate_embeddings: (batch, height / patch, width / patch, hidden)`.
    """

    def forward(self, pixel_values: torch.Tensor) -> Tensors:
        """Return the embeddings of images."""
        embedded = self.model.get_image_embeddings(pixel_values)  # type: ignore[operator]
        if isinstance(embedded, torch.Tensor):
            return {EMBEDDINGS: embedded}
        return {EMBEDDINGS: embedded[0], INTERMEDIATE: embedded[1][0]}


class _MaskDecoder(Wrapper):
    """Decoder of embeddings and points to `pred_masks: (batch, points, masks, height, width)` and `iou_scores`.

    `iou_scores` is `(batch, points, masks)`.
    """

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        """Predict three masks of different sizes for each group of points, and the quality of each mask."""
        arguments: dict[str, Any] = dict(inputs)
        if INTERMEDIATE in arguments:
            arguments[INTERMEDIATE] = [arguments[INTERMEDIATE]]
        output = self.model(**arguments)
        return {"pred_masks": output.pred_masks, "iou_scores": output.iou_scores}


class Sam(Family):
    """Family of SAM and SAM-HQ."""

    def parts(self, model: torch.nn.Module, example: Tensors, axes: Axes) -> tuple[ModelPart, ...]:
        """Return the image encoder and the mask decoder as two graphs.

        The image encoder reads `pixel_values: (batch, channels, height, width)`. The mask decoder reads the image embeddings,
        `input_points: (batch, points, each, 2)` and `input_labels: (batch, points, each)`. `each` is the number of points for one
        mask.
        """
        pixels = example["pixel_values"]
        batch, _, height, width = pixels.shape
        points: Tensors = {
            "input_points": torch.rand((batch, _MASKS, _POINTS_PER_MASK, 2)) * torch.tensor([width, height]),
            "input_labels": torch.tensor(_LABELS).expand(batch, _MASKS, _POINTS_PER_MASK).contiguous(),
        }
        encoder = _ImageEncoder(model).eval()
        with torch.inference_mode():
            dtype = next(
                (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32
            )
            embedded = encoder(pixel_values=pixels.to(dtype))
        # All samples are in float32, also for models in half precision.
        embedded = {name: value.float().clone() for name, value in embedded.items()}
        named: Axes = {name: {0: "batch"} for name in embedded} | {
            name: {0: "batch", 1: "points", 2: "each"} for name in points
        }
        return (
            ModelPart(
                name=IMAGE_ENCODER, model=encoder, example={"pixel_values": pixels}, axes={"pixel_values": {0: "batch"}}
            ),
            ModelPart(name=MASK_DECODER, model=_MaskDecoder(model).eval(), example={**embedded, **points}, axes=named),
        )


FAMILY = Sam()
