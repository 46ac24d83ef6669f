"""Sample inputs for models that compare each image with each text, such as CLIP. The number of images and texts may differ."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import ExportError
from ..interfaces.family import Sample
from ..interfaces.tracing_wrapper import unwrapped
from .samples import (
    SAMPLE_BATCH,
    SAMPLE_SEQUENCE,
    image_sample,
    image_size,
    parameters_of,
    resize,
    text_config,
    text_inputs,
)

SAMPLE_TEXTS = 3
# Number of texts for all images together. It is divisible by 1, 2 and 3, which are the numbers of images in the reference cases.
_TEXTS_OF_ALL = 6


def image_text_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Make two images and three texts: `pixel_values: (batch, channels, height, width)` and `input_ids: (texts, sequence)`."""
    return _images_and_texts(module, folder, SAMPLE_TEXTS, "texts")


def detection_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Make two images and three texts for each image, for zero-shot object detection. The texts are `(texts, sequence)`.

    Grounding DINO gets only one text for each image, because one text contains all phrases to detect.

    Raises:
        ExportError: The model has no input `input_ids`.
    """
    if "input_ids" not in parameters_of(module):
        inner = unwrapped(module)
        raise ExportError(
            f"{type(inner).__name__} cannot be exported for zero-shot object detection. It has no input 'input_ids' for the texts; its "
            f"inputs are {', '.join(parameters_of(module))}.",
            fix="run the model with transformers.",
        )
    one_text = getattr(module.config, "max_text_len", None) is not None
    return _images_and_texts(
        module, folder, SAMPLE_BATCH if one_text else _TEXTS_OF_ALL, "batch" if one_text else "texts"
    )


def pair_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Make two pairs of images, `pixel_values: (batch, 2, channels, height, width)`, in the image size of the processor."""
    height, width = image_size(module.config, folder)
    pixels = torch.rand((SAMPLE_BATCH, 2, 3, height, width))
    return {"pixel_values": pixels}, {"pixel_values": {0: "batch"}}, ()


def _images_and_texts(module: torch.nn.Module, folder: Path | None, count: int, axis: str) -> Sample:
    """Make two images, and `count` texts whose first axis has the given name."""
    texts, text_axes, unused = sample_texts(module, folder, count, axis)
    images, axes = image_sample(module, folder, texts)
    return {**texts, **images}, {**text_axes, **axes}, unused


def sample_texts(module: torch.nn.Module, folder: Path | None, count: int, axis: str) -> Sample:
    """Make `count` texts whose first axis has the given name. Also return the names of text inputs that the model ignores."""
    config = text_config(module.config)
    names, unused = text_inputs(module, config, folder)
    axes = {name: {0: axis, 1: "sequence"} for name in names}
    inputs = {name: torch.ones((count, SAMPLE_SEQUENCE), dtype=torch.int64) for name in names}
    return resize(inputs, axes, {axis: count, "sequence": SAMPLE_SEQUENCE}, module.config, seed=0), axes, unused
