"""Weight-only quantization to 4 or 8 bits with one scale for each block (`MatMulNBits`); activations stay in floating point."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import torch

from ..graph.editing import MICROSOFT, NewNodes, add_initializer, nodes, read_graph, root_graph, serialized
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
# Number of weights that each thread processes together. Smaller parts fit into the L2 cache, but then the threads wait
# longer for Python's lock: on two cores, a weight takes 44 ns with parts of 2^15 weights, and 10 ns with parts of 2^18.
_TOGETHER = 2**18
# Largest number of threads. Each thread has buffers of about 2.5 MB.
_MOST_THREADS = 16


CHECKPOINT = "accel.checkpoint"
"""Key in the `meta` of the first constant of a quantized weight. The value is a `CheckpointMatrix`."""


BlockConstants = tuple[ir.Value, ...]
"""Constants of a `MatMulNBits` node: values, scales and optional zero points."""


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A block-wise quantized weight in a graph.

    Attributes:
        constants: The constants, from `add_blocks`.
        inner, outer: The sizes of the weight matrix.
        bits: The number of bits, 4 or 8.
        block_size: The number of weights that share a scale.
    """

    constants: BlockConstants
    inner: int
    outer: int
    bits: int
    block_size: int


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight that is quantized in blocks along its inner axis.

    Attributes:
        packed: `(outer, blocks, block_size * bits / 8) uint8`; see `pack`.
        scales: `(outer, blocks) float32`.
        zero_points: `(outer, blocks)`, uint8, or float32 from `hqq`.
        symmetric: Whether the zero point of every block is the middle of the integer range.
        bits: The number of bits, 4 or 8.
    """

    packed: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray
    symmetric: bool
    bits: int

    @property
    def values(self) -> np.ndarray:
        """The integers `(outer, blocks, block_size) uint8`, not packed."""
        if self.bits == 8:
            return self.packed
        pairs = np.stack([self.packed & 15, self.packed >> 4], axis=-1)
        return pairs.reshape(*self.packed.shape[:-1], -1)

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

    `rtn` uses as many cores as PyTorch (`torch.get_num_threads()`). The result does not depend on their number.
    """
    if algorithm == "hqq" and not symmetric:
        return _quantize_hqq(weight, bits=bits, block_size=block_size)
    return _quantize_rtn(weight, bits=bits, block_size=block_size, symmetric=symmetric)[0]


def _quantize_hqq(weight: np.ndarray, *, bits: int, block_size: int) -> BlockWeight:
    """Quantize a weight `(inner, outer)` with fractional zero points."""
    inner, outer = weight.shape
    blocks = -(-inner // block_size)
    padded = np.zeros((outer, blocks * block_size), np.float32)
    padded[:, :inner] = weight.T
    data = padded.reshape(outer, blocks, block_size)
    top = 2**bits - 1
    low, high = np.minimum(data.min(axis=-1), 0), np.maximum(data.max(axis=-1), 0)
    scales = np.where(high - low > top * _LEAST, (high - low) / top, 1.0).astype(np.float32)
    zero = _half_quadratic(data, scales, np.clip(np.rint(-low / scales), 0, top), top)
    values = np.clip(np.rint(data / scales[..., None] + zero[..., None]), 0, top).astype(np.uint8)
    return BlockWeight(pack(values, bits), scales, zero.astype(np.float32), symmetric=False, bits=bits)


def _quantize_rtn(
    weight: np.ndarray, *, bits: int, block_size: int, symmetric: bool, measure: bool = False
) -> tuple[BlockWeight, float, float]:
    """Quantize a weight in parts; with `measure`, also return the sums of squared errors and of squared weights."""
    inner, outer = weight.shape
    blocks = -(-inner // block_size)
    result = BlockWeight(
        np.empty((outer, blocks, block_size * bits // 8), np.uint8),
        np.empty((outer, blocks), np.float32),
        np.empty((outer, blocks), np.uint8),
        symmetric,
        bits,
    )
    # The parts do not depend on the number of threads, so the result does not depend on it. A part is longer along the
    # axis on which the weights are contiguous.
    together = max(_TOGETHER // block_size, 1)
    if weight.strides[0] <= weight.strides[1]:
        columns = max(min(blocks, together), 1)
        rows = max(min(outer, together // columns), 1)
    else:
        rows = max(min(outer, together), 1)
        columns = max(min(blocks, together // rows), 1)
    parts = [
        (slice(row, min(row + rows, outer)), slice(column, min(column + columns, blocks)))
        for row in range(0, outer, rows)
        for column in range(0, blocks, columns)
    ]
    sums = np.zeros((len(parts), 2))
    workers = max(min(torch.get_num_threads(), len(parts), _MOST_THREADS), 1)

    def work(worker: int) -> None:
        shape = (block_size, rows * columns)
        scratch = _Scratch(np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty(shape, np.uint8))
        for i in range(worker, len(parts), workers):
            _quantize_part(weight, result, parts[i], scratch, sums[i] if measure else None)

    if workers == 1:
        work(0)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, range(workers)))
    lost, size = sums.sum(axis=0)
    return result, float(lost), float(size)


class _Scratch(NamedTuple):
    """Buffers of one thread, `(block_size, blocks of a part)`: positions, rounded values, and integers."""

    positions: np.ndarray
    values: np.ndarray
    integers: np.ndarray


def _quantize_part(
    weight: np.ndarray, result: BlockWeight, part: tuple[slice, slice], scratch: _Scratch, sums: np.ndarray | None
) -> None:
    """Quantize some rows and blocks of a weight into `result`; `sums` receives the sums of squares.

    The blocks of the part are columns of the buffers, so that each operation works on long contiguous rows.
    """
    rows, columns = part
    bits, symmetric = result.bits, result.symmetric
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    count = shape[0] * shape[1]
    size = len(scratch.positions)
    positions, values, integers = (buffer.reshape(-1)[: size * count].reshape(size, count) for buffer in scratch)
    _read(weight, rows, columns, positions.reshape(size, *shape))
    low, high = positions.min(axis=0), positions.max(axis=0)
    if symmetric:
        # Map the value with the largest absolute value of each block to -8 (or -128 for 8 bits), which has no positive
        # counterpart.
        extreme = np.where(-low > high, low, high)
        scales = np.where(np.abs(extreme) > middle * _LEAST, -extreme / np.float32(middle), np.float32(1))
        zero = np.full(count, middle, np.float32)
    else:
        # Divide before the subtraction, which could overflow.
        low, high = np.minimum(low, 0) / np.float32(top), np.maximum(high, 0) / np.float32(top)
        scales = np.where(high - low > _LEAST, high - low, np.float32(1))
        zero = np.clip(np.rint(-low / scales * np.float32(top)), 0, top)
    np.multiply(positions, 1 / scales, out=positions)
    sizes = _least_squares(positions, values) if symmetric and bits == 4 else None
    if sizes is not None:
        scales = scales * sizes
        np.multiply(positions, 1 / sizes, out=positions)
    np.add(positions, zero, out=values)
    np.rint(values, out=values)
    # For NumPy, a row of limits is several times faster than a single limit.
    np.minimum(values, np.full(count, top, np.float32), out=values)
    np.maximum(values, np.zeros(count, np.float32), out=values)
    np.copyto(integers, values, casting="unsafe")
    result.scales[part] = scales.reshape(shape)
    result.zero_points[part] = zero.reshape(shape)
    if sums is not None:
        np.subtract(values, zero, out=values)
        np.subtract(values, positions, out=values)
        for i, numbers in enumerate((values, positions)):
            squares = np.einsum("bn,bn->n", numbers, numbers)
            sums[i] = (squares * scales.astype(np.float64) ** 2).sum()
    if bits == 4:
        np.left_shift(integers[1::2], 4, out=integers[1::2])
        integers = np.bitwise_or(integers[0::2], integers[1::2])
    np.copyto(result.packed[part], integers.reshape(-1, *shape).transpose(1, 2, 0))


def _read(weight: np.ndarray, rows: slice, columns: slice, data: np.ndarray) -> None:
    """Copy blocks of a weight `(inner, outer)` into `data`: `(block_size, rows, columns) float32`, padded with 0."""
    size = len(data)
    complete = min(columns.stop, len(weight) // size)
    count = complete - columns.start
    source = weight[columns.start * size : complete * size, rows]
    np.copyto(data[..., :count], source.reshape(count, size, source.shape[1]).transpose(1, 2, 0), casting="same_kind")
    if complete < columns.stop:
        rest = weight[complete * size :, rows]
        data[: len(rest), :, count] = rest
        data[len(rest) :, :, count] = 0


def _least_squares(positions: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the factors of symmetric scales that minimize the squared error of blocks.

    For each candidate scale, all weights are rounded; then the scale is fitted to the rounded values.

    Args:
        positions: `(block_size, blocks)`, weights in steps: the value with the largest absolute value of a block is at
            -8, all others are between -8 and 8.
        values: A buffer of the same shape.
    """
    count = positions.shape[1]
    least, most = np.full(count, -8, np.float32), np.full(count, 7, np.float32)
    best_share, sizes = np.zeros(count, np.float32), np.ones(count, np.float32)
    products, squares = np.empty(count, np.float32), np.empty(count, np.float32)
    for extreme in _EXTREMES:
        np.multiply(positions, np.float32(extreme / 8), out=values)
        np.rint(values, out=values)
        np.minimum(values, most, out=values)
        if extreme > 8:
            np.maximum(values, least, out=values)
        # With this memory layout, einsum multiplies and adds long rows in one pass.
        np.einsum("bn,bn->n", positions, values, out=products)
        np.einsum("bn,bn->n", values, values, out=squares)
        fitted = products / np.maximum(squares, 1)
        # The part of the sum of squared weights that remains after rounding, with the scale that fits best.
        remaining = products * fitted
        better = remaining > best_share
        np.copyto(best_share, remaining, where=better)
        np.copyto(sizes, fitted, where=better)
    return sizes


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
    _, lost, size = _quantize_rtn(weight, bits=4, block_size=block_size, symmetric=symmetric, measure=True)
    return float(np.sqrt(lost / max(size, 1e-12)))


def quantize_weights(
    layers: Sequence[QuantizableLayer],
    *,
    bits: Sequence[int],
    block_size: int,
    symmetric: bool,
    algorithm: Literal["rtn", "hqq"],
) -> list[BlockMatrix]:
    """Replace layers of one model by `MatMulNBits`; `bits` contains the number of bits for each layer.

    A weight that several layers share is quantized once. Return the quantized weight of each layer.
    """
    stored: dict[tuple[int, object, int], BlockMatrix] = {}
    matrices = []
    for layer, width in zip(layers, bits, strict=True):
        key = (id(root_graph(layer.node)), layer.weight_key, width)
        if key not in stored:
            checkpoint, weight = layer.checkpoint(), layer.weight()
            blocks = quantize_blocks(
                weight,
                bits=width,
                block_size=block_size,
                symmetric=symmetric,
                algorithm=algorithm if width == 4 else "rtn",
            )
            is_integer = blocks.zero_points.dtype == np.uint8
            zeros = pack(blocks.zero_points, width) if is_integer else blocks.zero_points
            constants = add_blocks(layer, blocks.packed, blocks.scales, None if symmetric else zeros)
            if checkpoint is not None:
                constants[0].meta[CHECKPOINT] = checkpoint
            stored[key] = BlockMatrix(constants, weight.shape[0], weight.shape[1], width, block_size)
        matrix = stored[key]
        put_blocks(layer, matrix.constants, inner=matrix.inner, outer=matrix.outer, bits=width, block_size=block_size)
        matrices.append(matrix)
    return matrices


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


def without_rounded_activations(path: Path, graph: bytes | None = None) -> bytes | None:
    """Return a serialized graph in which kernels do not round the activations of block-wise quantized layers.

    Args:
        path: The graph file.
        graph: The serialized graph, if it differs from the file.

    Returns:
        The graph, or `None` if it has no layer whose activations are rounded.
    """
    model = read_graph(path, None if graph is None else onnx.load_from_string(graph))
    rounding = [n for n in nodes(model, "MatMulNBits", domain=MICROSOFT) if "accuracy_level" in n.attributes]
    for node in rounding:
        del node.attributes["accuracy_level"]
    return serialized(model) if rounding else None
