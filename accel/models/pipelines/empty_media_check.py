"""Detection of empty sounds and images before a processor pads or resizes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import InputError


class ChecksEmpty:
    """Mixin for transformers' pipelines that raises for sounds without samples and images without pixels.

    Without this check, processors would pad the empty input, and the model would return a meaningless result.
    """

    def preprocess(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the inputs, then preprocess them like transformers' pipeline.

        Raises:
            InputError: A sound or image is empty.
        """
        if isinstance(inputs, Mapping):
            for name in ("raw", "array", "image"):
                check_not_empty(inputs.get(name))
        else:
            check_not_empty(inputs)
        return super().preprocess(inputs, *args, **kwargs)  # type: ignore[misc]


def check_not_empty(value: Any) -> None:
    """Check that an image or an array of samples is not empty; values of other types are accepted.

    Raises:
        InputError: The image or array is empty.
    """
    size = getattr(value, "size", None)
    if isinstance(size, tuple) and 0 in size:
        raise InputError(
            f"An input image is empty: it has {size[0]} x {size[1]} pixels.", fix="leave the empty image out."
        )
    if (isinstance(size, int) and size == 0) or (hasattr(value, "numel") and value.numel() == 0):
        raise InputError("An input sound is empty: it has no samples.", fix="leave the empty sound out.")
