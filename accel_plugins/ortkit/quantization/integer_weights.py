"""Quantization of constant weights to 8 bits for integer products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight `(inner, outer)` as int8, with one scale and zero point for the weight or for each output channel.

    Attributes:
        values: `(inner, outer) int8`.
        scale: `() float32`, or `(outer,) float32`.
        zero_point: int8, with the shape of `scale`.
    """

    values: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray


def quantize_int8(weight: np.ndarray, *, per_channel: bool, symmetric: bool, reduce_range: bool) -> Int8Weight:
    """Round a weight `(inner, outer)` to signed 8 bits (7 bits with `reduce_range`).

    With `symmetric`, the zero point is 0, and the scale is the largest absolute value divided by 127, or by 63 for 7
    bits. Without `symmetric`, the integers cover the range from the smallest to the largest value, extended to include
    zero.
    """
    axis = 0 if per_channel else None
    top = 63 if reduce_range else 127
    weight = weight.astype(np.float32, copy=False)
    if symmetric:
        scale = np.abs(weight).max(axis=axis) / top
        scale = np.where(scale > 0, scale, 1.0).astype(np.float32)
        zero = np.zeros(scale.shape, np.int8)
        values = np.clip(np.rint(weight / scale), -top, top).astype(np.int8)
        return Int8Weight(values, scale, zero)
    bottom = -top - 1
    low = np.minimum(weight.min(axis=axis), 0)
    high = np.maximum(weight.max(axis=axis), 0)
    scale = (high - low) / (top - bottom)
    scale = np.where(scale > 0, scale, 1.0).astype(np.float32)
    zero_float = np.clip(np.rint(bottom - low / scale), bottom, top)
    values = np.clip(np.rint(weight / scale) + zero_float, bottom, top).astype(np.int8)
    return Int8Weight(values, scale, zero_float.astype(np.int8))
