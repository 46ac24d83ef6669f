"""Rows of images as inputs, the texts beside them, and columns of maps: pictures with a value for each pixel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..interfaces.family_registry import family_of
from ..upstream.auto_models import model_type_of
from ..upstream.library_output import quiet
from .batches import Encoded, images_of
from .rows import Rows

if TYPE_CHECKING:
    import torch

_UNLIMITED = 1 << 30  # tokenizers without a limit say 1e30


def encode_pictures(rows: Rows, processor: Any, max_length: int | None) -> Encoded:  # noqa: ARG001
    """Images, which are read when their batch is made: each alone where the processor leaves them of several sizes."""
    return Encoded(images=(images_of(rows), processor), alone=not makes_one_size(processor))


def makes_one_size(processor: Any) -> bool:
    """Whether a processor makes a batch of images that are high and wide."""
    from PIL import Image

    try:
        with quiet():
            processor([Image.new("RGB", (48, 160)), Image.new("RGB", (160, 64))], return_tensors="pt")
    except (ValueError, RuntimeError):
        return False
    return True


def tokenized(processor: Any, candidates: Sequence[str], max_length: int | None) -> dict[str, torch.Tensor]:
    """Texts as transformers' pipeline for such models tokenizes them: `(texts, sequence) int64`."""
    tokenizer = processor.tokenizer
    length = family_of({"model_type": model_type_of(processor)}).fixed_text_length
    if length is not None:
        options: dict[str, Any] = {"padding": "max_length", "max_length": length, "truncation": True}
    else:
        limit = max_length or (tokenizer.model_max_length if tokenizer.model_max_length < _UNLIMITED else None)
        options = {"padding": True, "max_length": limit, "truncation": limit is not None}
    return dict(tokenizer(list(candidates), return_tensors="pt", **options))


# Maps: a value for each pixel


def pixels(value: Any) -> npt.NDArray[Any]:
    """A picture or a nested list as an array `(height, width)` or `(height, width, channels)`."""
    if getattr(value, "mode", None) == "1":
        value = value.convert("L")
    return np.asarray(value)


def one_channel(value: Any, row: int, what: str) -> npt.NDArray[Any]:
    """The same, of pictures with one value a pixel; three channels that agree are one.

    Raises:
        InputError: Colours.
    """
    found = pixels(value)
    if found.ndim == 3 and (found[..., :1] == found[..., :3]).all():
        found = found[..., 0]
    if found.ndim != 2:
        raise InputError(
            f"The {what} of row {row} has shape {found.shape}: colours, and no value for each pixel.",
            fix=f"give pictures of one channel, whose values are the {what}.",
        )
    return found
