"""Models that make masks for points (SAM), as two graphs: the image's embeddings, computed once, and masks for any points in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import ExportError
from ..interfaces.wrapper import Tensors, Wrapper
from .samples import SAMPLE_BATCH, Axes, image_size
from .source import Source

IMAGE_ENCODER, MASK_DECODER = "image_encoder", "mask_decoder"
EMBEDDINGS, INTERMEDIATE = "image_embeddings", "intermediate_embeddings"
_MODELS = ("sam", "sam_hq")
_POINTS, _EACH = 5, 4  # masks that are asked for in an image, and points for each
# In front, behind, around the object, and padding.
_LABELS = (1, 0, -1, -10)
# Other numbers of masks and of points for each, the pipeline's among them: one point a mask.
_PLANS = ((0, 0), (3, -3), (-3, 1), (1, -3), (2, 2))


def mask_sample(module: torch.nn.Module, folder: Path | None) -> tuple[Tensors, Axes, tuple[str, ...]]:
    """Two images and points in them: `pixel_values: (batch, channels, height, width)`, `input_points: (batch, points, each, 2)` and
    `input_labels: (batch, points, each)`.

    Raises:
        ExportError: The model is another kind of SAM, whose embeddings are several.
    """
    inner: Any = module.unwrapped if isinstance(module, Wrapper) else module
    config: Any = module.config
    # SAM 2 and 3 answer with maps of several sizes, and EdgeTAM as they do.
    if getattr(config, "model_type", "") not in _MODELS:
        raise ExportError(
            f"A {type(inner).__name__} has other parts than SAM and SAM-HQ, of which graphs are made.",
            fix="run it with transformers.",
        )
    height, width = image_size(config, folder)
    points = torch.rand((SAMPLE_BATCH, _POINTS, _EACH, 2)) * torch.tensor([width, height])
    labels = torch.tensor(_LABELS).expand(SAMPLE_BATCH, _POINTS, _EACH).contiguous()
    sample = {
        "pixel_values": torch.randn((SAMPLE_BATCH, getattr(config.vision_config, "num_channels", 3), height, width)),
        "input_points": points,
        "input_labels": labels,
    }
    named = {0: "batch", 1: "points", 2: "each"}
    return sample, {"pixel_values": {0: "batch"}, "input_points": named, "input_labels": named}, ()


def point_sizes(sizes: Mapping[str, int], index: int) -> dict[str, int]:
    """Other numbers of points for the case `index`; nothing for a graph without such axes."""
    if not {"points", "each"} <= set(sizes):
        return {}
    more, longer = _PLANS[index % len(_PLANS)]
    return {"points": sizes["points"] + more, "each": sizes["each"] + longer}


def mask_parts(source: Source) -> tuple[Source, ...]:
    """The two graphs of a model."""
    encoder = _ImageEncoder(source.model).eval()
    with torch.inference_mode():
        dtype = next((one.dtype for one in source.model.parameters() if one.is_floating_point()), torch.float32)
        embedded = encoder(pixel_values=source.example["pixel_values"].to(dtype))
    # Of the values that embeddings have; in float32, as all samples.
    embedded = {name: value.float().clone() for name, value in embedded.items()}
    points = {name: source.example[name] for name in ("input_points", "input_labels")}
    decoder_axes = {name: {0: "batch"} for name in embedded} | {name: source.axes[name] for name in points}
    pixels = {"pixel_values": source.example["pixel_values"]}
    return (
        replace(
            source,
            model=encoder,
            name=IMAGE_ENCODER,
            example=pixels,
            axes={"pixel_values": source.axes["pixel_values"]},
        ),
        replace(
            source,
            model=_MaskDecoder(source.model).eval(),
            name=MASK_DECODER,
            example={**embedded, **points},
            axes=decoder_axes,
        ),
    )


class _ImageEncoder(Wrapper):
    """`pixel_values` to `image_embeddings: (batch, channels, height / patch, width / patch)`.

    SAM-HQ's mask decoder also reads what its first layer of global attention answers: `intermediate_embeddings: (batch, height /
    patch, width / patch, hidden)`.
    """

    def forward(self, pixel_values: torch.Tensor) -> Tensors:
        """Embed images."""
        found = self.model.get_image_embeddings(pixel_values)  # type: ignore[operator]
        if isinstance(found, torch.Tensor):
            return {EMBEDDINGS: found}
        return {EMBEDDINGS: found[0], INTERMEDIATE: found[1][0]}


class _MaskDecoder(Wrapper):
    """Embeddings and points to `pred_masks: (batch, points, masks, height, width)` and `iou_scores: (batch, points, masks)`."""

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        """Make three masks of several sizes for each group of points, and say how good each of them is."""
        given: dict[str, Any] = dict(inputs)
        if INTERMEDIATE in given:
            given[INTERMEDIATE] = [given[INTERMEDIATE]]
        found = self.model(**given)
        return {"pred_masks": found.pred_masks, "iou_scores": found.iou_scores}
