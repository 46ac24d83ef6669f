"""Read columns of images and columns with one value per pixel (such as depth maps), and tokenize candidate texts for images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..interfaces.family_registry import family_of
from ..upstream.auto_models import model_type_of
from ..upstream.output_silencing import quiet
from .columns import is_text
from .encoded_rows import EncodedRows, LazyColumn
from .rows import DatasetRows

if TYPE_CHECKING:
    import torch

_UNLIMITED = 1 << 30  # tokenizers without a limit have a model_max_length of 1e30


def encode_images(rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:  # noqa: ARG001
    """Encode the images of the rows. If the processor does not resize all images to one size, each batch has a single image."""
    return EncodedRows(media=(rgb_images(rows), processor), alone=not makes_one_size(processor))


def rgb_images(rows: DatasetRows) -> Sequence[Any]:
    """Return the column of images; each image is converted to RGB on access."""
    return LazyColumn([images_of(rows)], lambda image, *_: rgb(image))


def rgb(image: Any) -> Any:
    """Convert a PIL image to RGB; return other values, such as arrays, unchanged."""
    return image.convert("RGB") if hasattr(image, "convert") else image


def images_of(rows: DatasetRows, use: str = "image") -> Sequence[Any]:
    """Return the column of images. File paths are loaded as images; arrays are returned unchanged."""
    import datasets

    name = rows.name_of(use)
    dataset = rows.dataset
    if is_text(dataset.features[name]):
        missing = [path for path in dataset[name][:] if not Path(path).is_file()]
        if missing:
            raise InputError(
                f"{len(missing)} of {len(dataset)} image files do not exist. The first is {missing[0]!r}.",
                fix="use paths that are absolute or relative to the current folder.",
            )
        dataset = dataset.cast_column(name, datasets.Image())
    column: Sequence[Any] = dataset[name]
    return column


def makes_one_size(processor: Any) -> bool:
    """Return whether the processor resizes images to one size, tested with a tall and a wide image."""
    from PIL import Image

    try:
        with quiet():
            processor([Image.new("RGB", (48, 160)), Image.new("RGB", (160, 64))], return_tensors="pt")
    except (ValueError, RuntimeError):
        return False
    return True


def tokenized(processor: Any, candidates: Sequence[str], max_length: int | None) -> dict[str, torch.Tensor]:
    """Tokenize candidate texts as transformers' pipelines do: `(texts, sequence) int64`."""
    tokenizer = processor.tokenizer
    length = family_of({"model_type": model_type_of(processor)}).fixed_text_length
    if length is not None:
        options: dict[str, Any] = {"padding": "max_length", "max_length": length, "truncation": True}
    else:
        limit = max_length or (tokenizer.model_max_length if tokenizer.model_max_length < _UNLIMITED else None)
        options = {"padding": True, "max_length": limit, "truncation": limit is not None}
    return dict(tokenizer(list(candidates), return_tensors="pt", **options))


# Functions for images with one value per pixel, such as depth maps or segmentation maps.


def pixels(value: Any) -> npt.NDArray[Any]:
    """Convert an image or a nested list to an array `(height, width)` or `(height, width, channels)`."""
    if getattr(value, "mode", None) == "1":
        value = value.convert("L")
    return np.asarray(value)


def one_channel(value: Any, row: int, content: str) -> npt.NDArray[Any]:
    """Convert an image with one value per pixel to an array; three equal channels count as one channel.

    Raises:
        InputError: The channels of the image differ.
    """
    array = pixels(value)
    if array.ndim == 3 and (array[..., :1] == array[..., :3]).all():
        array = array[..., 0]
    if array.ndim != 2:
        raise InputError(
            f"The {content} of row {row} is a color image of shape {array.shape}, but it must have a single value per pixel.",
            fix=f"pass images with one channel that contains the {content}.",
        )
    return array
