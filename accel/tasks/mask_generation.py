"""Task `mask-generation`: masks of the objects at given points of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..capture.generation_graphs import family_parts
from ..errors import InputError
from ..interfaces.graph_and_tensor_names import EMBEDDINGS, IMAGE_ENCODER, INTERMEDIATE, MASK_DECODER
from ..interfaces.task import Task
from ..models.modality_models import TwoGraphModel
from ..models.outputs import fast_output, numpy_too


@dataclass
class MaskGenerationOutput(ModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """Output of a mask generation model; an image processor's `post_process_masks` resizes the masks to the image's size.

    Attributes:
        iou_scores: Estimated intersection over union of each mask with the true mask, `(batch, points, 3)`.
        pred_masks: Mask logits, above 0 inside the object, `(batch, points, 3, height / 4, width / 4)`.
    """

    iou_scores: torch.Tensor | None = None
    pred_masks: torch.Tensor | None = None


class ORTModelForMaskGeneration(TwoGraphModel):
    """Model that generates masks for points in images: `pred_masks: (batch, points, 3, height / 4, width / 4)`."""

    task = "mask-generation"
    output_class = MaskGenerationOutput
    components = (IMAGE_ENCODER, MASK_DECODER)

    @numpy_too
    def get_image_embeddings(self, pixel_values: Any, **inputs: Any) -> Any:
        """Return the image embeddings of `(batch, channels, height, width)`; for SAM-HQ, also a list with one layer's output."""
        outputs = self._run({"pixel_values": pixel_values, **inputs})
        return (outputs[EMBEDDINGS], [outputs[INTERMEDIATE]]) if INTERMEDIATE in outputs else outputs[EMBEDDINGS]

    def forward(
        self,
        pixel_values: Any = None,
        input_points: Any = None,
        input_labels: Any = None,
        image_embeddings: Any = None,
        intermediate_embeddings: Any = None,
        multimask_output: bool = True,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Generate three masks for each group of points.

        Args:
            pixel_values: Images `(batch, channels, height, width)`; must be `None` if `image_embeddings` are passed.
            input_points: x and y of each point in pixels of the processed image, `(batch, groups, points per group, 2)`.
            input_labels: `(batch, groups, points per group)`: 1 for a point inside the object, 0 for a point outside, -10 for padding; all
                ones when `None`.
            image_embeddings: Result of `get_image_embeddings`, for several calls with the same image.
            intermediate_embeddings: Second result of `get_image_embeddings`, for SAM-HQ.
            multimask_output: Must be true. The graph always returns three masks per group.
            return_dict: `False` returns a tuple.
            **others: Other outputs of the processor, which are ignored, and inputs of the image encoder.

        Raises:
            InputError: Points or images are missing, both images and embeddings were passed, or prompts other than points, such as boxes,
                were passed.
        """
        self._check_fork()
        unsupported = sorted(name for name in _OTHER_PROMPTS if not _is_nothing(others.pop(name, None)))
        if unsupported or not multimask_output:
            raise InputError(
                f"{unsupported[0] if unsupported else 'multimask_output=False'} is not supported: the exported graphs accept only points "
                "as prompts and always return three masks for each group of points.",
                fix="pass only input_points and input_labels as prompts, or run the original model with transformers.",
            )
        if input_points is None:
            raise InputError(
                "The argument input_points is missing.",
                fix="pass input_points of shape (batch, groups, points per group, 2).",
            )
        if (pixel_values is None) is (image_embeddings is None):
            raise InputError(
                "pixel_values and image_embeddings are both missing."
                if pixel_values is None
                else "pixel_values and image_embeddings were both passed.",
                fix="pass pixel_values or image_embeddings, but not both.",
            )
        numpy = not isinstance(input_points, torch.Tensor)
        others = {name: value for name, value in others.items() if name not in _OF_PROCESSORS}
        if image_embeddings is None:
            pixel_values = torch.as_tensor(pixel_values)
            embeddings = self.get_image_embeddings(pixel_values, **others)
            image_embeddings, intermediate_embeddings = (
                embeddings if isinstance(embeddings, tuple) else (embeddings, None)
            )
        elif others:
            raise InputError(
                f"The model has no input {min(others)!r} if image_embeddings are passed.",
                fix=f"leave {min(others)} out.",
            )
        points = torch.as_tensor(input_points)
        labels = torch.ones(points.shape[:-1]) if input_labels is None else torch.as_tensor(input_labels)
        feeds = {
            EMBEDDINGS: torch.as_tensor(image_embeddings),
            "input_points": points.to(self.dtype),
            "input_labels": labels.to(device=points.device, dtype=torch.int64),
        }
        if any(spec.name == INTERMEDIATE for spec in self._decoder.inputs):
            if not intermediate_embeddings:
                raise InputError(
                    "The argument intermediate_embeddings is missing; SAM-HQ needs it in addition to image_embeddings.",
                    fix="pass both values that model.get_image_embeddings(pixel_values) returns.",
                )
            feeds[INTERMEDIATE] = torch.as_tensor(intermediate_embeddings[0])
        if len(feeds[EMBEDDINGS]) != len(points):
            raise InputError(
                f"input_points has points for {len(points)} images, but {len(feeds[EMBEDDINGS])} images were passed.",
                fix="pass points for every image.",
            )
        values = self._decoder.run(feeds)
        ordered: dict[str, Any] = {name: values[name] for name in ("iou_scores", "pred_masks")}
        if numpy:
            ordered = {name: value.cpu().numpy() for name, value in ordered.items()}
        return tuple(ordered.values()) if return_dict is False else fast_output(MaskGenerationOutput, ordered)


def _is_nothing(value: Any) -> bool:
    return value is None or value is False


_OTHER_PROMPTS = ("input_boxes", "input_masks", "attention_similarity", "target_embedding", "hq_token_only")
_OF_PROCESSORS = ("original_sizes", "reshaped_input_sizes")


class MaskGeneration(Task):
    """The task `mask-generation`: masks of the objects at given points of an image."""

    model = ORTModelForMaskGeneration

    def parts(self, source: Any, fusion: Any) -> Sequence[Any] | None:
        return family_parts(source)

    def tiny_batch(self, config: Any, rows: int, draw: torch.Generator, texts: Any) -> dict[str, torch.Tensor]:
        points = 32 * torch.rand((rows, 4, 2, 2), generator=draw)
        labels = torch.randint(0, 2, points.shape[:-1], generator=draw)
        pixels = torch.randn((rows, 3, 32, 32), generator=draw)
        return {"pixel_values": pixels, "input_points": points, "input_labels": labels}
