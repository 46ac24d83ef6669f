"""Conversion of recurrent layers: the operator `accel::recurrence` becomes a loop over the tokens (`TensorIterator`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops
from openvino.frontend.pytorch import ConversionExtension

from accel.capture import DELTA_RECURRENCE, RECURRENCE, RECURRENCE_DOMAIN

_PARTS = ("decay", "key", "value", "query", "beta")


def _convert(context: Any, *, delta: bool) -> list[ov.Output]:
    """Convert the recurrence operator to OpenVINO operators.

    The output contains the results of all tokens, then the final state, packed as in `accel.capture.recurrence`.
    """
    decay, rate, key, value, query, *beta, state = (context.get_input(i) for i in range(7 if delta else 6))
    scanned = [decay, key, value, query, *beta]
    before = ops.parameter(state.get_partial_shape(), ov.Type.f32, name="state")
    rates = ops.parameter(rate.get_partial_shape(), ov.Type.f32, name="rate")
    parts = []
    for source, name in zip(scanned, _PARTS, strict=False):
        shape = source.get_partial_shape()
        shape[1] = ov.Dimension(1)
        parts.append(ops.parameter(shape, ov.Type.f32, name=name))
    step, k, v, q = (_squeezed(part) for part in parts[:4])
    decayed = ops.multiply(before, ops.exp(ops.multiply(step, rates)))
    if delta:
        recalled = ops.reduce_sum(ops.multiply(decayed, k), np.array([2]), keep_dims=True)
        v = ops.multiply(ops.subtract(v, recalled), _squeezed(parts[4]))
    after = ops.add(decayed, ops.multiply(k, v))
    result = ops.unsqueeze(ops.matmul(q, after, False, False), np.array([1]))
    results = [ops.result(after), ops.result(result)]
    loop = ops.tensor_iterator()
    loop.set_body(ov.Model(results, [before, rates, *parts], "recurrence"))
    loop.set_invariant_input(rates, rate)
    for part, source in zip(parts, scanned, strict=True):
        loop.set_sliced_input(part, source, 0, 1, 1, -1, 1)
    loop.set_merged_input(before, state, results[0].output(0))
    last = loop.get_iter_value(results[0].output(0), -1)
    collected = loop.get_concatenated_slices(results[1].output(0), 0, 1, 1, -1, 1)
    packed = ops.unsqueeze(ops.transpose(last, np.array([0, 2, 1, 3])), np.array([3]))
    return [ops.concat([collected, packed], axis=1).output(0)]


def _squeezed(part: ov.Node) -> ov.Node:
    return ops.squeeze(part, np.array([1]))


CONVERSIONS = (
    ConversionExtension(f"{RECURRENCE_DOMAIN}.{RECURRENCE}.default", lambda context: _convert(context, delta=False)),
    ConversionExtension(
        f"{RECURRENCE_DOMAIN}.{DELTA_RECURRENCE}.default", lambda context: _convert(context, delta=True)
    ),
)
"""Conversion rules of the recurrence operators, for transformers' exporter."""
