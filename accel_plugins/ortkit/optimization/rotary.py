"""Fusion of rotary position embeddings (Su et al., 2021) into one operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ..graph.analysis import dims, producer, split_heads
from ..graph.editing import MICROSOFT, NewNodes, constant, nodes, replace_value, root_graph, scalar
from ..graph.rewrites import graph_rewrite


@dataclass(frozen=True, slots=True)
class _Rotation:
    """A matched rotation: `x * cos + concat(-second half of x, first half of x) * sin`.

    Attributes:
        source: The value to rotate, `(batch, heads, length, depth)`.
        cos: Cosines `(batch or 1, length, depth)`; both halves of the last axis are equal.
        sin: Sines of the same shape.
    """

    source: ir.Value
    cos: ir.Value
    sin: ir.Value


@graph_rewrite
def fuse_rotary(model: ir.Model) -> int:
    """Fuse rotary position embeddings into ONNX Runtime's `RotaryEmbedding`.

    The operator reads cosines and sines from tables, by the position of a token. The fusion passes the cosines and
    sines that the graph computed as tables with one row for each token, so the result is correct for any scaling of
    positions. If possible, the new node comes before the transpose of the heads.
    """
    count = 0
    tables: dict[tuple[int, int, int], list[ir.Value]] = {}
    for added in nodes(model, "Add"):
        rotation = _match(added)
        if rotation is None:
            continue
        cos, sin = rotation.cos, rotation.sin
        key = id(added.graph), id(cos), id(sin)
        if key not in tables:
            tables[key] = [_positions(added, cos), _table(added, cos), _table(added, sin)]
        replace_value(added.outputs[0], _turn(added, rotation.source, tables[key]))
        count += 1
    return count


def _match(added: ir.Node) -> _Rotation | None:
    for direct, rotated in (added.inputs, reversed(added.inputs)):
        straight, crossed = producer(direct, "Mul"), producer(rotated, "Mul")
        if straight is None or crossed is None:
            return None
        for source, wave in (straight.inputs, reversed(straight.inputs)):
            cos = _doubled(wave, "Cos")
            if cos is None or source is None:
                continue
            for swapped, other_wave in (crossed.inputs, reversed(crossed.inputs)):
                sin = _doubled(other_wave, "Sin")
                if sin is not None and _fits(source, wave) and _swaps_halves(swapped, source):
                    return _Rotation(source, cos, sin)
    return None


def _doubled(value: ir.Value | None, operator: str) -> ir.Value | None:
    """Return the cosines or sines `(batch, length, depth)` before an `Unsqueeze` to `(batch, 1, length, depth)`.

    Return `None` if the two halves of the last axis are not computed from the same value.
    """
    spread = producer(value, "Unsqueeze")
    axis = constant(spread.inputs[1]) if spread is not None else None
    if spread is None or axis is None or axis.reshape(-1).tolist() not in ([1], [-3]):
        return None
    source = wave = spread.inputs[0]
    scaled = producer(wave, "Mul")
    if scaled is not None:
        wave = scaled.inputs[0] if scalar(scaled.inputs[1]) is not None else scaled.inputs[1]
    angles = producer(wave, operator)
    joined = producer(angles.inputs[0], "Concat") if angles is not None else None
    if joined is None or len(dims(source) or ()) != 3 or joined.attributes.get_int("axis", 0) not in (-1, 2):
        return None
    return source if len(joined.inputs) == 2 and joined.inputs[0] is joined.inputs[1] else None


def _fits(source: ir.Value, wave: ir.Value | None) -> bool:
    """Return whether cosines `(batch or 1, 1, length, depth)` match a value `(batch, heads, length, depth)`."""
    sizes, wave_sizes = dims(source), dims(wave)
    if sizes is None or wave_sizes is None or len(sizes) != 4 or len(wave_sizes) != 4:
        return False
    depth = sizes[3]
    return isinstance(depth, int) and depth % 2 == 0 and wave_sizes[0] in (1, sizes[0]) and wave_sizes[2:] == sizes[2:]


def _swaps_halves(value: ir.Value | None, source: ir.Value) -> bool:
    """Return whether a value is the concatenation of the negated second half and the first half of `source`."""
    joined = producer(value, "Concat")
    depth = (dims(source) or [0])[-1]
    if joined is None or len(joined.inputs) != 2 or joined.attributes.get_int("axis", 0) not in (-1, 3):
        return False
    negated = producer(joined.inputs[0], "Neg")
    assert isinstance(depth, int)
    return (
        negated is not None
        and _is_slice(negated.inputs[0], source, depth // 2, depth)
        and _is_slice(joined.inputs[1], source, 0, depth // 2)
    )


def _is_slice(value: ir.Value | None, source: ir.Value, start: int, end: int) -> bool:
    """Return whether a value is the slice `start:end` of the last axis of `source`."""
    cut = producer(value, "Slice")
    if cut is None or cut.inputs[0] is not source or len(cut.inputs) < 4:
        return False
    slice_start, slice_end, axis = (scalar(item) for item in cut.inputs[1:4])
    step = scalar(cut.inputs[4]) if len(cut.inputs) > 4 else 1
    depth = (dims(source) or [0])[-1]
    assert isinstance(depth, int)
    return (
        slice_start == start
        and slice_end is not None
        and min(slice_end, depth) == end
        and axis in (3, -1)
        and step == 1
    )


def _table(added: ir.Node, wave: ir.Value) -> ir.Value:
    """Return the first half of the cosines or sines with one row for each token: `(batch * length, depth / 2)`."""
    new, depth = NewNodes(root_graph(added), f"{wave.name}.half"), (dims(wave) or [0])[-1]
    assert isinstance(depth, int)
    half = new.op("Slice", wave, new.constant([0]), new.constant([depth // 2]), new.constant([2]), dtype=wave.dtype)
    rows = new.op("Reshape", half, new.constant([-1, depth // 2]), dtype=wave.dtype)
    new.graph.insert_before(added, new.nodes)
    return rows


def _positions(added: ir.Node, wave: ir.Value) -> ir.Value:
    """Return the table row of each token, `(batch, length)`; the single index 0 if all rows of the batch share positions."""
    new, integer = NewNodes(root_graph(added), f"{wave.name}.positions"), ir.DataType.INT64
    if (dims(wave) or [0])[0] == 1:
        return new.constant([0])
    assert wave.shape is not None
    shape = new.op("Shape", wave, end=2, dtype=integer)
    size = new.op("ReduceProd", shape, keepdims=0, dtype=integer)
    counted = new.op("Range", new.constant(0), size, new.constant(1), dtype=integer)
    positions = new.op("Reshape", counted, shape, dtype=integer, shape=wave.shape[:2])
    new.graph.insert_before(added, new.nodes)
    return positions


def _turn(added: ir.Node, source: ir.Value, tables: Sequence[ir.Value]) -> ir.Value:
    """Return the rotated value `(batch, heads, length, depth)`.

    If a transpose produces the heads, the rotation is inserted before the transpose, because the attention fusions
    expect the transpose as the last operator.
    """
    new, old = NewNodes(root_graph(added), f"{added.name}.rotary"), added.outputs[0]
    transpose = producer(source, "Transpose")
    split = transpose.inputs[0] if transpose is not None else None
    sizes = dims(split)
    if sizes is None or transpose is None or list(transpose.attributes.get_ints("perm", [])) != [0, 2, 1, 3]:
        rotated = new.op("RotaryEmbedding", source, *tables, domain=MICROSOFT, like=old)
    else:
        assert split is not None
        assert split.shape is not None
        heads, head_sizes = split_heads(source), sizes[2:]
        flat = heads[0] if heads is not None else None
        if flat is None:
            width = math.prod(size for size in head_sizes if isinstance(size, int))
            flat = new.op(
                "Reshape", split, new.constant([0, 0, width]), dtype=split.dtype, shape=[*split.shape[:2], width]
            )
        rotated = new.op("RotaryEmbedding", flat, *tables, domain=MICROSOFT, like=flat)
        unflattened = new.op("Reshape", rotated, new.constant([0, 0, *head_sizes]), like=split)
        rotated = new.op("Transpose", unflattened, perm=[0, 2, 1, 3], like=old)
    new.graph.insert_before(added, new.nodes)
    return rotated
