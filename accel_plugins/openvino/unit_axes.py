"""Workarounds for axes of size 1: OpenVINO's compiler removes repeats along them, and computes reductions wrongly after
int8 layers.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset13 as operators

# Reductions that return a single element unchanged, so they can be removed along an axis of size 1.
_REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")


def keep_unit_axes(model: ov.Model) -> None:
    """Rewrite repeats and reductions along axes of size 1, so that the compiled model computes the same results as the
    graph.
    """
    keep_repeats(model)
    tile_one_axis_each(model)
    drop_reductions(model)


def drop_reductions(model: ov.Model) -> None:
    """Remove axes of size 1 without computing the reductions along them.

    After int8 layers, OpenVINO (2026.4, AVX2) computes different means along an axis of size 1 in a batch and for a
    single row. SwiftFormer and LeViT have such an axis for small images, because they pool over one position.
    """
    for node in [node for node in model.get_ops() if node.get_type_name() in _REDUCTIONS]:
        data, axes = node.input_values()
        if axes.get_node().get_type_name() != "Constant" or data.get_partial_shape().rank.is_dynamic:
            continue
        chosen = np.atleast_1d(axes.get_node().get_data())
        if not chosen.size or any(data.get_partial_shape()[int(axis)] != ov.Dimension(1) for axis in chosen):
            continue
        reduced = data if node.get_attributes()["keep_dims"] else operators.squeeze(data, chosen).output(0)
        node.output(0).replace(reduced)


def keep_repeats(model: ov.Model) -> None:
    """Replace a `Gather` that repeats an axis created by `Unsqueeze` with a `Broadcast`.

    The converter uses this `Gather` for `repeat_interleave` along an axis of size 1 (YOSO's mask for each head). If
    sizes are dynamic, OpenVINO (2026.4, `EliminateUnsqueezeGather`) removes both operators, even if `Gather` has
    several indices. The result then has a wrong shape, or wrong values where the shape is broadcast.
    """
    repeats = [node for node in model.get_ops() if _repeats(node)]
    for node in repeats:
        data, indices = node.input_value(0), node.input_value(1)
        axis, rank, added = _axis(node), _rank(data), _rank(indices) - 1
        if added:
            data = operators.unsqueeze(data, np.arange(axis, axis + added)).output(0)
        before, behind = np.ones(axis, np.int64), np.ones(rank - axis - 1, np.int64)
        times = operators.concat([before, operators.shape_of(indices), behind], 0)
        repeated = operators.broadcast(data, operators.multiply(operators.shape_of(data), times))
        repeated.set_friendly_name(node.get_friendly_name())
        node.output(0).replace(repeated.output(0))
    if repeats:
        model.validate_nodes_and_infer_types()


def tile_one_axis_each(model: ov.Model) -> None:
    """Split each `Tile` that repeats several axes into one `Tile` per axis.

    OpenVINO (2026.4) computes a `Tile` of two axes wrongly if the first has size 1 and other sizes are dynamic: repeats
    of one row end up in another row. This affects Grounding DINO's text mask for heads and queries.
    """
    for node in [node for node in model.get_ops() if node.get_type_name() == "Tile"]:
        data, times = node.input_values()
        counts = _known_numbers(times)
        repeated = [axis for axis, count in enumerate(counts) if count != 1]
        if len(repeated) < 2:
            continue
        unit_counts = np.ones(len(counts), np.int64)
        for axis in repeated:
            chosen = np.arange(len(counts)) == axis
            alone = operators.select(chosen, operators.convert(times, "i64"), unit_counts)
            data = operators.tile(data, alone).output(0)
        node.output(0).replace(data)
    model.validate_nodes_and_infer_types()


def _known_numbers(value: ov.Output) -> list[int | None]:
    """Return the numbers in a 1-D tensor of a graph, with `None` for numbers that are not constant. Return an empty
    list if the size of the tensor is unknown.
    """
    node, shape = value.get_node(), value.get_partial_shape()
    if node.get_type_name() == "Constant":
        return [int(number) for number in node.get_data().reshape(-1)]
    if node.get_type_name() == "Concat":
        parts = [_known_numbers(part) for part in node.input_values()]
        return [number for part in parts for number in part] if all(parts) else []
    return [None] * shape[0].get_length() if shape.is_static and len(shape) == 1 else []


def _repeats(node: ov.Node) -> bool:
    """Return whether a node gathers several indices (not a single number) from an axis of size 1 that `Unsqueeze` created."""
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
