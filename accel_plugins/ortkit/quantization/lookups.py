"""Block-wise quantized embedding tables: the operator `GatherBlockQuantized` reads and dequantizes only the rows of the token ids.

A tied table is stored once: the constant of `GatherBlockQuantized` has the same bytes as the constant of `MatMulNBits`, and the weight file
contains equal weights once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from accel.config import QuantizeConfig

from ..graph.analysis import dims
from ..graph.editing import MICROSOFT, NewNodes, add_initializer, constant, replace_value, root_graph
from ..graph.rewrites import Rewrite
from .layers import EmbeddingLookup, constant_key
from .weight_only import BlockMatrix, pack, quantize_blocks

TABLE = "accel.table"
"""Key in the `meta` of the integers of a quantized table. The value is a `CheckpointPart` and the `QuantizedTable`."""
# Bits of tables that are not the weight of a quantized layer. A model uses each number of a row, while the errors of the weights in a
# product partly cancel out.
_BITS = 8


@dataclass(frozen=True, slots=True)
class QuantizedTable:
    """The constants of a quantized table `(rows, width)` in a graph.

    Attributes:
        integers: `(rows, blocks * block_size * bits / 8) uint8`; see `pack`.
        scales: `(rows, blocks) float32`.
        zero_points: `(rows, blocks * bits / 8) uint8`; `None` for the middle of the integer range.
        offsets: `(rows, blocks) float32`, subtracted from dequantized rows, for fractional zero points; `None` if there are none.
        bits: The number of bits, 4 or 8.
        block_size: The number of weights that share a scale.
        width: The number of weights in a row.
    """

    integers: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    offsets: ir.Value | None
    bits: int
    block_size: int
    width: int


def quantize_lookups(
    models: Mapping[str, ir.Model],
    lookups: Sequence[EmbeddingLookup],
    matrices: Mapping[int, BlockMatrix],
    config: QuantizeConfig,
) -> dict[int, int]:
    """Replace lookups by `GatherBlockQuantized`, and return the number of bits by the `id` of the lookup.

    A table that is also the weight of a quantized layer gets the integers of the layer. Other tables get 8 bits. If a node other than these
    lookups reads a table in float, the table stays in float.

    Args:
        models: The graphs by component name; their layers are already quantized.
        lookups: The lookups to replace.
        matrices: The quantized weights by the `id` of the layer.
        config: Quantization settings.
    """
    quantized_nodes = {lookup.node for lookup in lookups}
    float_tables = {key for model in models.values() for key in _float_tables(model, quantized_nodes)}
    tables = _Tables(matrices, config)
    bits: dict[int, int] = {}

    def rewrite(model: ir.Model) -> int:
        graphs = set(model.graphs())
        count = 0
        for lookup in lookups:
            if lookup.node.graph not in graphs or (
                tables.matrix(lookup) is None and constant_key(lookup.table) in float_tables
            ):
                continue
            table = tables.of(lookup)
            if table.offsets is not None and dims(lookup.node.inputs[1]) is None:
                continue
            _replace(lookup, table)
            bits[id(lookup)] = table.bits
            count += 1
        return count

    for model in models.values():
        Rewrite("quantized embeddings", rewrite).apply(model)
    return bits


def _float_tables(model: ir.Model, quantized_nodes: set[ir.Node]) -> set[object]:
    """Return the keys of the matrices that a node other than the lookups to replace reads."""
    return {
        constant_key(value)
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None
        and len(value.const_value.shape) == 2
        and any(use.node not in quantized_nodes for use in value.uses())
    }


class _Tables:
    """Quantizes each table once, and adds it once to each graph that needs it."""

    def __init__(self, matrices: Mapping[int, BlockMatrix], config: QuantizeConfig) -> None:
        self._matrices = matrices
        self._config = config
        self._arrays: dict[object, tuple[np.ndarray, np.ndarray, np.ndarray | None]] = {}
        self._tables: dict[tuple[ir.Graph, object], QuantizedTable] = {}

    def matrix(self, lookup: EmbeddingLookup) -> BlockMatrix | None:
        """Return the quantized weight of the layer to which a table is tied, or `None`."""
        return None if lookup.tied is None else self._matrices.get(id(lookup.tied))

    def of(self, lookup: EmbeddingLookup) -> QuantizedTable:
        """Return the constants of a table, in the graph of the lookup."""
        graph, key = root_graph(lookup.node), constant_key(lookup.table)
        if (graph, key) not in self._tables:
            self._tables[graph, key] = self._added(lookup, graph, key)
        return self._tables[graph, key]

    def _added(self, lookup: EmbeddingLookup, graph: ir.Graph, key: object) -> QuantizedTable:
        """Add the constants of a table to a graph."""
        matrix, base = self.matrix(lookup), f"{lookup.node.name}.table"
        bits, constants = (_BITS, ()) if matrix is None else (matrix.bits, matrix.constants)
        integers, scales, zeros = self._quantized(lookup, key) if matrix is None else _arrays(constants)

        def added(position: int, name: str, array: np.ndarray) -> ir.Value:
            """Return the constant of the layer if it is in the same graph, else a new constant."""
            if position < len(constants) and constants[position].graph is graph:
                return constants[position]
            return add_initializer(graph, f"{base}_{name}", array)

        # The operator accepts only integer zero points.
        fractional = None if zeros is None or zeros.dtype == np.uint8 else zeros
        middle = np.float32(2 ** (bits - 1))
        table = QuantizedTable(
            integers=add_initializer(graph, f"{base}_blocks", integers.reshape(len(integers), -1)),
            scales=added(1, "scales", scales),
            zero_points=None if zeros is None or fractional is not None else added(2, "zero_points", zeros),
            offsets=None
            if fractional is None
            else add_initializer(graph, f"{base}_offsets", (fractional - middle) * scales),
            bits=bits,
            block_size=self._config.block_size,
            width=int(dims(lookup.table)[1]),  # type: ignore[index, arg-type]
        )
        checkpoint = lookup.checkpoint()
        if checkpoint is not None:
            table.integers.meta[TABLE] = checkpoint, table
        return table

    def _quantized(self, lookup: EmbeddingLookup, key: object) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Quantize a table whose weights belong to no quantized layer."""
        if key not in self._arrays:
            symmetric = self._config.symmetric is not False
            blocks = quantize_blocks(
                lookup.values().T, bits=_BITS, block_size=self._config.block_size, symmetric=symmetric
            )
            self._arrays[key] = blocks.packed, blocks.scales, None if symmetric else pack(blocks.zero_points, _BITS)
        return self._arrays[key]


def _arrays(constants: Sequence[ir.Value]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the integers, scales and zero points of a quantized weight."""
    integers, scales = constant(constants[0]), constant(constants[1])
    assert integers is not None
    assert scales is not None
    return integers, scales, constant(constants[2]) if len(constants) > 2 else None


def _replace(lookup: EmbeddingLookup, table: QuantizedTable) -> None:
    """Replace a lookup by a lookup in the quantized table."""
    node, ids = lookup.node, lookup.node.inputs[1]
    graph = root_graph(node)
    new = NewNodes(graph, str(node.name))
    rows = new.op(
        "GatherBlockQuantized", table.integers, ids, table.scales, table.zero_points, domain=MICROSOFT,
        bits=table.bits, block_size=table.block_size, gather_axis=0, quantize_axis=1, dtype=ir.DataType.FLOAT,
    )  # fmt: skip
    if table.offsets is not None:
        offsets = new.op("Gather", table.offsets, ids, dtype=ir.DataType.FLOAT)
        offsets = new.op("Unsqueeze", offsets, new.constant([-1]), dtype=ir.DataType.FLOAT)
        sizes = [0] * len(dims(ids) or ())
        blocks = new.op("Reshape", rows, new.constant([*sizes, -1, table.block_size]), dtype=ir.DataType.FLOAT)
        rows = new.op("Sub", blocks, offsets, dtype=ir.DataType.FLOAT)
        rows = new.op("Reshape", rows, new.constant([*sizes, -1]), dtype=ir.DataType.FLOAT)
    if table.width % table.block_size:
        ends = (new.constant([0]), new.constant([table.width]), new.constant([-1]))
        rows = new.op("Slice", rows, *ends, dtype=ir.DataType.FLOAT)
    graph.insert_before(node, new.nodes)
    replace_value(node.outputs[0], rows)
    graph.remove(node, safe=True)
