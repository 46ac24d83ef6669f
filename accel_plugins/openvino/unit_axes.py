"""Axes of one entry, along which OpenVINO's compiler drops repeats and its int8 layers misread what is reduced."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset13 as operators

# Reductions that return a single number unchanged.
_REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")


def keep_unit_axes(model: ov.Model) -> None:
    """Rewrite repeats and reductions along axes of one entry, so that the compiled model computes the same as the model."""
    keep_repeats(model)
    tile_one_axis_each(model)
    drop_reductions(model)


def drop_reductions(model: ov.Model) -> None:
    """Take away axes of one without reducing them.

    Behind layers in 8 bits, OpenVINO (2026.4, AVX2) answered another mean of such an axis in batches than for each row alone:
    SwiftFormer and LeViT pool one place where images are small.
    """
    for node in [node for node in model.get_ops() if node.get_type_name() in _REDUCTIONS]:
        data, axes = node.input_values()
        if axes.get_node().get_type_name() != "Constant" or data.get_partial_shape().rank.is_dynamic:
            continue
        chosen = np.atleast_1d(axes.get_node().get_data())
        if not chosen.size or any(data.get_partial_shape()[int(axis)] != ov.Dimension(1) for axis in chosen):
            continue
        kept = data if node.get_attributes()["keep_dims"] else operators.squeeze(data, chosen).output(0)
        node.output(0).replace(kept)


def keep_repeats(model: ov.Model) -> None:
    """Let `Broadcast` repeat what `Gather` takes by a list of indices from an axis that `Unsqueeze` made.

    That is how `repeat_interleave` along an axis of one is converted (YOSO's mask for each head). Where sizes vary, OpenVINO
    (2026.4, `EliminateUnsqueezeGather`) drops both operators, however many indices there are: the result has another shape, or
    other numbers where that broadcasts.
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


def tile_one_axis_each(model: ov.Model) -> None:
    """Let each `Tile` repeat one axis.

    Where one that repeats two begins with an axis of one and other sizes vary, OpenVINO (2026.4) puts the repeats of one row in the
    place of another's: Grounding DINO's mask of its texts for heads and queries.
    """
    for node in [node for node in model.get_ops() if node.get_type_name() == "Tile"]:
        data, times = node.input_values()
        counts = _known_numbers(times)
        repeated = [axis for axis, count in enumerate(counts) if count != 1]
        if len(repeated) < 2:
            continue
        ones = np.ones(len(counts), np.int64)
        for axis in repeated:
            chosen = np.arange(len(counts)) == axis
            alone = operators.select(chosen, operators.convert(times, "i64"), ones)
            data = operators.tile(data, alone).output(0)
        node.output(0).replace(data)
    model.validate_nodes_and_infer_types()


def _known_numbers(value: ov.Output) -> list[int | None]:
    """The numbers of a list, `None` for each that only a run knows; empty where their count is not known."""
    node, shape = value.get_node(), value.get_partial_shape()
    if node.get_type_name() == "Constant":
        return [int(number) for number in node.get_data().reshape(-1)]
    if node.get_type_name() == "Concat":
        parts = [_known_numbers(part) for part in node.input_values()]
        return [number for part in parts for number in part] if all(parts) else []
    return [None] * shape[0].get_length() if shape.is_static and len(shape) == 1 else []


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
