"""Inputs of many floating-point values that can be computed again exactly on every machine, instead of storing them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

MOST_STORED = 2048
"""Number of floating-point values up to which an input is stored."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Numbers that look random, computed from their index with integers, so that all machines get the same bits.

    Attributes:
        shape: Shape of the tensor.
        low: Smallest value.
        width: Difference between the largest and the smallest value.
        seed: Seed.
        dtype: Data type, as torch name.
    """

    shape: tuple[int, ...]
    low: float
    width: float
    seed: int
    dtype: str = "float32"

    @classmethod
    def like(cls, tensor: torch.Tensor, seed: int) -> Noise:
        """Return noise with the shape, dtype, mean and standard deviation of a tensor."""
        values = tensor.double()
        spread = float(values.std()) * 3**0.5
        low = float(values.mean()) - spread
        return cls(tuple(tensor.shape), low, 2 * spread, seed, str(tensor.dtype).removeprefix("torch."))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Noise:
        """Return the noise with the fields of a dictionary."""
        return cls(**{**values, "shape": tuple(values["shape"])})

    def tensor(self) -> torch.Tensor:
        """Compute the values."""
        # The multipliers are those of the integer hash xxhash32, which mixes all bits.
        with np.errstate(over="ignore"):
            x = np.arange(int(np.prod(self.shape)), dtype=np.uint32) * np.uint32(2654435761) + np.uint32(self.seed)
            x = (x ^ (x >> np.uint32(15))) * np.uint32(2246822519)
            x = (x ^ (x >> np.uint32(13))) * np.uint32(3266489917)
        fractions = (x >> np.uint32(8)).astype(np.float64) / (1 << 24)
        values = torch.from_numpy(fractions * self.width + self.low).reshape(self.shape)
        return values.to(getattr(torch, self.dtype))
