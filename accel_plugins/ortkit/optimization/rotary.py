"""Rotary positions (Su et al., 2021) as one operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graph.analysis import dims, producer, split_heads
from ..graph.editing import MICROSOFT, add_initializer, constant, nodes, replace_value, root_graph, scalar
from ..graph.rewrites import graph_rewrite


@dataclass(frozen=True, slots=True)
class _Rotation:
    """`x * cos + concat(-second half of x, first half of x) * sin`.

    Attributes:
        source: What is turned: `(batch, heads, length, depth)`.
        cos: Cosines `(batch or 1, length, depth)`, whose two halves are equal.
        sin: Sines, alike.
    """

    source: ir.Value
    cos: ir.Value
    sin: ir.Value


@graph_rewrite
def fuse_rotary(model: ir.Model) -> int:
    """Rotary positions as `RotaryEmbedding`, before a projection's heads are transposed where that can be.

    The operator looks cosines up by position. Here its table are the cosines that the graph computed, one row for each
    token, so that it holds for any scaling of positions.
    """
    count = 0
    tables: dict[tuple[int, int], ir.Value] = {}
    for added in nodes(model, "Add"):
        found = _match(added)
        if found is None:
            continue
        graph = root_graph(added)
        rows = [_half(graph, added, value, tables) for value in (found.cos, found.sin)]
        positions = _positions(graph, added, found.cos, tables)
        turned = _turn(graph, added, found.source, [positions, *rows])
        replace_value(added.outputs[0], turned)
        count += 1
    return count


def _match(added: ir.Node) -> _Rotation | None:
    for one, other in (added.inputs, reversed(added.inputs)):
        straight, crossed = producer(one, "Mul"), producer(other, "Mul")
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
    """Cosines (or sines) `(batch, length, depth)` behind `(batch, 1, length, depth)`, when their halves are equal."""
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
    """Whether cosines `(batch or 1, 1, length, depth)` belong to `(batch, heads, length, depth)`."""
    sizes, wave_sizes = dims(source), dims(wave)
    if sizes is None or wave_sizes is None or len(sizes) != 4 or len(wave_sizes) != 4:
        return False
    depth = sizes[3]
    return isinstance(depth, int) and depth % 2 == 0 and wave_sizes[0] in (1, sizes[0]) and wave_sizes[2:] == sizes[2:]


def _swaps_halves(value: ir.Value | None, source: ir.Value) -> bool:
    """Whether a value is the negated second half of `source` before its first half."""
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
    """Whether a value is this part of the last axis of `source`."""
    cut = producer(value, "Slice")
    if cut is None or cut.inputs[0] is not source or len(cut.inputs) < 4:
        return False
    first, last, axis = (scalar(item) for item in cut.inputs[1:4])
    step = scalar(cut.inputs[4]) if len(cut.inputs) > 4 else 1
    depth = (dims(source) or [0])[-1]
    assert isinstance(depth, int)
    return first == start and last is not None and min(last, depth) == end and axis in (3, -1) and step == 1


def _half(graph: ir.Graph, before: ir.Node, wave: ir.Value, tables: dict[tuple[int, int], ir.Value]) -> ir.Value:
    """The first half of the cosines as a table: `(batch * length, depth / 2)`."""
    key = id(graph), id(wave)
    if key not in tables:
        depth = (dims(wave) or [0])[-1]
        assert isinstance(depth, int)
        ends = [add_initializer(graph, f"{wave.name}.{k}", np.array([v], np.int64))
                for k, v in (("from", 0), ("to", depth // 2), ("axis", 2))]  # fmt: skip
        cut = ir.node("Slice", [wave, *ends], name=f"{wave.name}.half")
        shape = add_initializer(graph, f"{wave.name}.rows_shape", np.array([-1, depth // 2], np.int64))
        rows = ir.node("Reshape", [cut.outputs[0], shape], name=f"{wave.name}.rows")
        for node in (cut, rows):
            node.outputs[0].type = wave.type
        graph.insert_before(before, [cut, rows])
        tables[key] = rows.outputs[0]
    return tables[key]


def _positions(graph: ir.Graph, before: ir.Node, wave: ir.Value, tables: dict[tuple[int, int], ir.Value]) -> ir.Value:
    """Which row of the table belongs to each token: `(batch, length)`, or the first of them where rows have one table."""
    key = id(graph), -id(wave)
    if key in tables:
        return tables[key]
    if (dims(wave) or [0])[0] == 1:
        tables[key] = add_initializer(graph, f"{wave.name}.first", np.zeros(1, np.int64))
        return tables[key]
    shape = ir.node("Shape", [wave], {"end": 2}, name=f"{wave.name}.tokens")
    size = ir.node("ReduceProd", [shape.outputs[0]], {"keepdims": 0}, name=f"{wave.name}.count")
    zero = add_initializer(graph, f"{wave.name}.zero", np.array(0, np.int64))
    one = add_initializer(graph, f"{wave.name}.one", np.array(1, np.int64))
    counted = ir.node("Range", [zero, size.outputs[0], one], name=f"{wave.name}.range")
    made = ir.node("Reshape", [counted.outputs[0], shape.outputs[0]], name=f"{wave.name}.positions")
    for node in (shape, size, counted, made):
        node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    made.outputs[0].shape = ir.Shape(wave.shape[:2]) if wave.shape is not None else None
    graph.insert_before(before, [shape, size, counted, made])
    tables[key] = made.outputs[0]
    return made.outputs[0]


def _turn(graph: ir.Graph, added: ir.Node, source: ir.Value, tables: list[ir.Value]) -> ir.Value:
    """The rotated value `(batch, heads, length, depth)`.

    Where the heads come from a transpose, what is before it is turned: attention operators look for a transpose last.
    """
    transpose = producer(source, "Transpose")
    split = transpose.inputs[0] if transpose is not None else None
    sizes = dims(split)
    made: list[ir.Node] = []
    if (
        transpose is None
        or split is None
        or sizes is None
        or list(transpose.attributes.get_ints("perm", [])) != [0, 2, 1, 3]
    ):
        rotary = ir.node("RotaryEmbedding", [source, *tables], domain=MICROSOFT, name=f"{added.name}.rotary")
        made.append(rotary)
    else:
        found = split_heads(source)
        count, depth = sizes[2:]
        assert isinstance(count, int)
        assert isinstance(depth, int)
        if found is None:
            shape = add_initializer(graph, f"{split.name}.flat_shape", np.array([0, 0, count * depth], np.int64))
            made.append(ir.node("Reshape", [split, shape], name=f"{split.name}.flat"))
            made[-1].outputs[0].type, made[-1].outputs[0].shape = split.type, _flat(split, count * depth)
        flat = found[0] if found is not None else made[-1].outputs[0]
        rotary = ir.node("RotaryEmbedding", [flat, *tables], domain=MICROSOFT, name=f"{added.name}.rotary")
        rotary.outputs[0].type, rotary.outputs[0].shape = flat.type, flat.shape
        shape = add_initializer(graph, f"{split.name}.split_shape", np.array([0, 0, count, depth], np.int64))
        back = ir.node("Reshape", [rotary.outputs[0], shape], name=f"{added.name}.split")
        back.outputs[0].type, back.outputs[0].shape = split.type, split.shape
        made += [
            rotary,
            back,
            ir.node("Transpose", [back.outputs[0]], {"perm": [0, 2, 1, 3]}, name=f"{added.name}.heads"),
        ]
    graph.insert_before(added, made)
    result = made[-1].outputs[0]
    result.type, result.shape = added.outputs[0].type, added.outputs[0].shape
    return result


def _flat(split: ir.Value, width: int) -> ir.Shape:
    assert split.shape is not None
    return ir.Shape([split.shape[0], split.shape[1], width])
