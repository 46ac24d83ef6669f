"""Repeats along an axis that was made for them, which OpenVINO's compiler takes for nothing."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset13 as operators


def keep_repeats(model: ov.Model) -> None:
    """Let `Broadcast` repeat what `Gather` takes by a list of indices from an axis that `Unsqueeze` made.

    That is how `repeat_interleave` along an axis of one is converted (YOSO's mask for each head). Where sizes vary, OpenVINO
    (2026.4, `EliminateUnsqueezeGather`) drops both operators, however many indices there are: the result has another shape, or
    other numbers where that broadcasts. `Tile` is no way out: repeats of two axes beside each other come out in another order.
    """
    found = [node for node in model.get_ops() if _repeats(node)]
    for node in found:
        data, indices = node.input_value(0), node.input_value(1)
        axis, rank, added = _axis(node), _rank(data), _rank(indices) - 1
        if added:
            data = operators.unsqueeze(data, np.arange(axis, axis + added)).output(0)
        before, behind = np.ones(axis, np.int64), np.ones(rank - axis - 1, np.int64)
        times = operators.concat([before, operators.shape_of(indices), behind], 0)
        repeated = operators.broadcast(data, operators.multiply(operators.shape_of(data), times))
        repeated.set_friendly_name(node.get_friendly_name())
        node.output(0).replace(repeated.output(0))
    if found:
        model.validate_nodes_and_infer_types()


def _repeats(node: ov.Node) -> bool:
    """Whether a node gathers by a list of indices, not by one number, from an axis that was made with one entry."""
    if node.get_type_name() != "Gather" or node.get_attributes().get("batch_dims"):
        return False
    data, indices, axis = node.input_values()
    return bool(
        data.get_node().get_type_name() == "Unsqueeze"
        and axis.get_node().get_type_name() == "Constant"
        and data.get_partial_shape().rank.is_static
        and indices.get_partial_shape().rank.is_static
        and _rank(indices) > 0
        and data.get_partial_shape()[_axis(node)] == ov.Dimension(1)
    )


def _axis(node: ov.Node) -> int:
    axis = int(node.input_value(2).get_node().get_data().item())
    return axis % _rank(node.input_value(0))


def _rank(value: ov.Output) -> int:
    rank: int = value.get_partial_shape().rank.get_length()
    return rank
