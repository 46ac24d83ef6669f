"""Weight-only quantization to 4 or 8 bits with one scale for each block (`MatMulNBits`); activations stay in floating point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from ..graph.editing import MICROSOFT, NewNodes, add_initializer, root_graph
from .integer import finish
from .layers import QuantizableLayer

# Value of the attribute `accuracy_level` that allows kernels to round activations to 8 bits in blocks. Such kernels are
# several times faster on CPUs with 8-bit dot products.
_INT8_ACCUMULATION = 4
# Candidates for the number of steps between zero and the block's value with the largest absolute value. Values of more
# than 8 steps are clipped.
_EXTREMES = np.linspace(7, 9, 9)
# Scales below this number are close to the smallest normal float32 number, so blocks with such scales are rounded to 0.
_LEAST = np.float32(1e-37)
# Number of weights that are processed together, so that they fit into the cache of a CPU core.
_TOGETHER = 2**16


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight that is quantized in blocks along its inner axis.

    Attributes:
        values: `(outer, blocks, block_size) uint8`, not packed.
        scales: `(outer, blocks) float32`.
        zero_points: `(outer, blocks)`, uint8, or float32 from `hqq`.
        symmetric: Whether the zero point of every block is the middle of the integer range.
    """

    values: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray
    symmetric: bool

    def dequantized(self, inner: int) -> np.ndarray:
        """Return the weight `(inner, outer) float32` after quantization, as the kernel uses it."""
        centered = self.values.astype(np.float32) - self.zero_points[..., None].astype(np.float32)
        matrix: np.ndarray = (centered * self.scales[..., None]).reshape(len(centered), -1)[:, :inner].T
        return matrix


def quantize_blocks(
    weight: np.ndarray, *, bits: int, block_size: int, symmetric: bool, algorithm: Literal["rtn", "hqq"] = "rtn"
) -> BlockWeight:
    """Quantize a weight `(inner, outer)` in blocks.

    `rtn` rounds to the nearest step; for symmetric 4-bit blocks, it tries nine scales and uses the one with the
    smallest squared error. `hqq` (Badri and Shaji, 2023, half-quadratic quantization) adjusts the zero points: the many
    small errors shrink, and a few large errors grow. `hqq` runs 20 iterations and needs no data. The zero points of
    `hqq` are fractional. For fractional zero points, ONNX Runtime's CPU kernel computes in float32, which is more
    accurate and slower than the kernel for `rtn`.
    """
    inner, outer = weight.shape
    blocks = -(-inner // block_size)
    padded = np.zeros((outer, blocks * block_size), np.float32)
    padded[:, :inner] = weight.T
    data = padded.reshape(outer, blocks, block_size)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        # Map the value with the largest absolute value of each block to -8 (or -128 for 8 bits), which has no positive
        # counterpart.
        extreme = np.take_along_axis(data, np.abs(data).argmax(axis=-1)[..., None], axis=-1)[..., 0]
        scales = np.where(np.abs(extreme) > middle * _LEAST, -extreme / middle, 1.0).astype(np.float32)
        if bits == 4:
            scales = _least_squares(data, scales)
        zero = np.full(scales.shape, float(middle), np.float32)
    else:
        low, high = np.minimum(data.min(axis=-1), 0), np.maximum(data.max(axis=-1), 0)
        scales = np.where(high - low > top * _LEAST, (high - low) / top, 1.0).astype(np.float32)
        zero = np.clip(np.rint(-low / scales), 0, top)
        if algorithm == "hqq":
            zero = _half_quadratic(data, scales, zero, top)
    values = np.clip(np.rint(data / scales[..., None] + zero[..., None]), 0, top).astype(np.uint8)
    zero_type = np.float32 if algorithm == "hqq" else np.uint8
    return BlockWeight(values, scales, zero.astype(zero_type), symmetric)


def _least_squares(data: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return symmetric scales that minimize the squared error of blocks `(outer, blocks, block_size)`.

    For each candidate scale, all weights are rounded; then the scale is fitted to the rounded values.
    """
    best = scales.copy()
    rows = max(_TOGETHER // data[0].size, 1)
    for start in range(0, len(data), rows):
        steps = best[start : start + rows]
        # Weights in steps: the value with the largest absolute value is at -8, all others are between -8 and 8.
        positions = data[start : start + rows] / steps[..., None]
        best_share, sizes = np.zeros(steps.shape, np.float32), np.ones(steps.shape, np.float32)
        for extreme in _EXTREMES:
            values = np.clip(np.rint(positions * np.float32(extreme / 8)), -8, 7)
            products, squares = (np.einsum("obi,obi->ob", values, factor) for factor in (positions, values))
            # The part of the sum of squared weights that remains after rounding, with the scale that fits best.
            kept_part = products**2 / np.maximum(squares, 1)
            better = kept_part > best_share
            best_share = np.where(better, kept_part, best_share)
            sizes[better] = (products / np.maximum(squares, 1))[better]
        steps *= sizes
    return best


def _half_quadratic(data: np.ndarray, scales: np.ndarray, zero: np.ndarray, top: int) -> np.ndarray:
    """Return zero points that minimize the sum of |error|^0.7, by alternating two closed-form updates."""
    power, beta, growth = 0.7, 10.0, 1.01
    unit = 1 / scales[..., None]
    best, best_error = zero, np.full(zero.shape, np.inf)
    current = zero
    for _ in range(20):
        values = np.clip(np.rint(data * unit + current[..., None]), 0, top)
        error = data - (values - current[..., None]) * scales[..., None]
        size = (np.abs(error) ** power).sum(axis=-1)
        better = size < best_error
        best, best_error = np.where(better, current, best), np.where(better, size, best_error)
        magnitude = np.maximum(np.abs(error), 1e-8)
        shrunk = np.sign(error) * np.maximum(magnitude - magnitude ** (power - 1) / beta, 0)
        current = np.clip((values - (data - shrunk) * unit).mean(axis=-1), 0, top)
        beta *= growth
    return best


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last axis of `(..., n) uint8` into bytes; values of 8 bits are returned unchanged.

    For 4 bits, the result is `(..., n / 2)`, with the first value of each pair in the low half of the byte.
    """
    if bits == 8:
        return values
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], 1), np.uint8)], axis=-1)
    packed: np.ndarray = values[..., 0::2] | (values[..., 1::2] << 4)
    return packed


def relative_error(layer: QuantizableLayer, *, block_size: int, symmetric: bool) -> float:
    """Return the relative error of a layer's weight after 4-bit quantization, to rank layers.

    The relative error is the square root of (sum of squared errors / sum of squared weights).
    """
    weight = layer.weight()
    blocks = quantize_blocks(weight, bits=4, block_size=block_size, symmetric=symmetric)
    lost = blocks.dequantized(weight.shape[0]) - weight
    return float(np.sqrt((lost**2).sum() / max(float((weight**2).sum()), 1e-12)))


def quantize_weights(
    layers: Sequence[QuantizableLayer],
    *,
    bits: Sequence[int],
    block_size: int,
    symmetric: bool,
    algorithm: Literal["rtn", "hqq"],
) -> None:
    """Replace layers of one model by `MatMulNBits`; `bits` contains the number of bits for each layer.

    A weight that several layers share is quantized once.
    """
    stored: dict[tuple[int, object, int], tuple[BlockConstants, tuple[int, int]]] = {}
    for layer, width in zip(layers, bits, strict=True):
        key = (id(root_graph(layer.node)), layer.weight_key, width)
        if key not in stored:
            weight = layer.weight()
            blocks = quantize_blocks(
                weight,
                bits=width,
                block_size=block_size,
                symmetric=symmetric,
                algorithm=algorithm if width == 4 else "rtn",
            )
            is_integer = blocks.zero_points.dtype == np.uint8
            zeros = pack(blocks.zero_points, width) if is_integer else blocks.zero_points
            constants = add_blocks(layer, pack(blocks.values, width), blocks.scales, None if symmetric else zeros)
            stored[key] = (constants, weight.shape)
        constants, (inner, outer) = stored[key]
        put_blocks(layer, constants, inner=inner, outer=outer, bits=width, block_size=block_size)


BlockConstants = tuple[ir.Value, ...]
"""Constants of a `MatMulNBits` node: values, scales and optional zero points."""


def add_blocks(
    layer: QuantizableLayer, packed: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None
) -> BlockConstants:
    """Add a block-wise quantized weight to a layer's graph as constants.

    Args:
        layer: The first layer that uses the weight; the names of the constants begin with the layer's name.
        packed: `(outer, blocks, block_size * bits / 8) uint8`.
        scales: `(outer, blocks) float32`.
        zeros: `(outer, blocks * bits / 8) uint8`, or `(outer, blocks) float32`; `None` for the middle of the integer
            range.
    """
    graph, base = root_graph(layer.node), str(layer.node.name)
    arrays = {"blocks": packed, "scales": scales, **({} if zeros is None else {"zero_points": zeros})}
    return tuple(add_initializer(graph, f"{base}.weight_{name}", array) for name, array in arrays.items())


def put_blocks(
    layer: QuantizableLayer,
    constants: BlockConstants,
    *,
    inner: int,
    outer: int,
    bits: int,
    block_size: int,
    int8_activations: bool = True,
) -> None:
    """Replace a layer by a `MatMulNBits` node.

    Args:
        layer: The layer to replace; its first input is the activation.
        constants: The constants of the weight, from `add_blocks`.
        inner, outer: The sizes of the weight matrix.
        bits: The number of bits, 4 or 8.
        block_size: The number of weights that share a scale.
        int8_activations: Whether kernels may round activations to 8 bits in blocks, which is faster.
    """
    new = NewNodes(root_graph(layer.node), str(layer.node.name))
    sizes: dict[str, Any] = {"K": inner, "N": outer, "bits": bits, "block_size": block_size}
    if int8_activations:
        sizes["accuracy_level"] = _INT8_ACCUMULATION
    finish(layer, new, new.op("MatMulNBits", layer.activation, *constants, domain=MICROSOFT, **sizes))
