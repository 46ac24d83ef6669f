"""The ranges of a model's embeddings, with which a server converts embeddings to 8-bit integers."""

from __future__ import annotations

import math
from pathlib import Path

from ..errors import IntegrityError
from .json_reading import read_json

EMBEDDING_RANGES = "embedding_ranges.json"
"""File next to a model with the fields `minimum` and `maximum`: one number for each dimension of a normalized embedding."""


def embedding_ranges(folder: Path) -> tuple[list[float], list[float]] | None:
    """Return the smallest and the largest value of each dimension; `None` if the folder has no such file.

    Raises:
        IntegrityError: The file does not contain two lists of equally many numbers.
    """
    file = folder / EMBEDDING_RANGES
    if not file.is_file():
        return None
    values = read_json(file)
    minimum, maximum = values.get("minimum"), values.get("maximum")
    numbers = [
        isinstance(limits, list) and all(isinstance(limit, int | float) and math.isfinite(limit) for limit in limits)
        for limits in (minimum, maximum)
    ]
    if (
        not all(numbers)
        or not isinstance(minimum, list)
        or not isinstance(maximum, list)
        or len(minimum) != len(maximum)
    ):
        raise IntegrityError(
            f"{file} must contain the fields minimum and maximum: two lists with one number for each dimension of an embedding.",
            fix="compute the ranges again from the normalized embeddings of many documents.",
        )
    return minimum, maximum
