"""Conversion of quantized PyTorch layers to OpenVINO.

Int8 layers become `FakeQuantize` and integer weights with scales. 4-bit layers become weights in blocks. Integers,
scales and zero points do not change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops
from openvino.frontend.pytorch import ConversionExtension

from accel.capture import BLOCK_LINEAR, INTEGER_LINEAR, OPERATOR_DOMAIN


def _integers(context: Any) -> list[ov.Output]:
    x = context.get_input(0)
    x_scale, x_zero, weight, scale, zero = (_constant_input(context, place) for place in range(1, 6))
    limits = np.iinfo(x_zero.dtype)
    low, high = (np.float32((limit - int(x_zero)) * x_scale) for limit in (limits.min, limits.max))
    rounded = ops.fake_quantize(x, low, high, low, high, levels=256)
    return [ops.matmul(rounded, _scaled(ops.constant(weight), scale[:, None], zero[:, None]), False, True).output(0)]


def _blocks(context: Any) -> list[ov.Output]:
    x = context.get_input(0)
    packed, scales, zeros = (_constant_input(context, place) for place in range(1, 4))
    bits = int(context.get_values_from_const_input(4))
    kind = ov.Type.u4 if bits == 4 else ov.Type.u8
    outer, count, width = packed.shape
    inner = int(context.get_values_from_const_input(5))
    values = _unpacked(packed, bits)
    if zeros.dtype == np.uint8:
        zeros = _unpacked(zeros, bits)[..., :count]
    weights = ops.constant(values, dtype=kind)
    if zeros.dtype == np.uint8:
        zero = ops.constant(np.ascontiguousarray(zeros[..., None]), dtype=kind)
        centered = ops.subtract(ops.convert(weights, ov.Type.f32), ops.convert(zero, ov.Type.f32))
    else:
        centered = ops.subtract(ops.convert(weights, ov.Type.f32), ops.constant(zeros[..., None]))
    matrix = ops.reshape(
        ops.multiply(centered, ops.constant(scales[..., None])), np.array([outer, count * width * (8 // bits)]), False
    )
    if count * width * (8 // bits) != inner:
        matrix = ops.slice(matrix, np.array([0]), np.array([inner]), np.array([1]), np.array([1]))
    return [ops.matmul(x, matrix, False, True).output(0)]


def _constant_input(context: Any, place: int) -> np.ndarray:
    """Return the values of a constant input of a quantized layer."""
    node = context.get_input(place).get_node()
    while node.get_type_name() != "Constant":
        node = node.input_value(0).get_node()
    return np.array(node.data)


def _scaled(values: ov.Node, scale: np.ndarray, zero: np.ndarray) -> ov.Node:
    centered: ov.Node = ops.convert(values, ov.Type.f32)
    if zero.any():
        centered = ops.subtract(centered, ops.convert(ops.constant(zero), ov.Type.f32))
    return ops.multiply(centered, ops.constant(np.ascontiguousarray(scale)))


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return packed
    halves = np.stack([packed & 15, packed >> 4], axis=-1)
    return np.ascontiguousarray(halves.reshape(*packed.shape[:-1], -1))


CONVERSIONS = (
    ConversionExtension(f"{OPERATOR_DOMAIN}.{INTEGER_LINEAR}.default", _integers),
    ConversionExtension(f"{OPERATOR_DOMAIN}.{BLOCK_LINEAR}.default", _blocks),
)
"""Conversion rules of the quantized layers' operators, for transformers' exporter."""
