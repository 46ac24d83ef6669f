"""Search for the layers that a quantizer can rewrite: products of an activation with a constant matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import onnx_ir as ir

from accel.config import matched_layers
from accel.errors import ConfigError, QuantizeError, did_you_mean

from ..graph.analysis import dims, producer
from ..graph.checkpoint_tensors import CheckpointPart, CheckpointTensor
from ..graph.editing import constant, identity, is_constant, layer_name, nodes

OPERATORS = ("MatMul", "Gemm")
LOOKUP = "Gather"
"""Name in `QuantizeConfig.operators` for embedding tables."""
# Operators between the token ids and a lookup. Positions are not computed with these operators only.
_OF_IDS = (
    "Cast", "Clip", "Equal", "Flatten", "Identity", "Max", "Min", "Not", "Reshape", "Squeeze", "Unsqueeze", "Where",
)  # fmt: skip
_FIRST_INPUT = ("Clip", "Reshape", "Squeeze", "Unsqueeze")
# Number of rows of two tables that are compared before the complete tables.
_COMPARED_ROWS = 16


class NamedNode(Protocol):
    """A node that a quantizer can rewrite, and the name of its module."""

    @property
    def node(self) -> ir.Node:
        """The node."""

    @property
    def name(self) -> str:
        """The name of the module that the node belongs to; the node's name if the module is unknown."""


_Named = TypeVar("_Named", bound=NamedNode)


@dataclass(frozen=True, slots=True)
class CheckpointMatrix:
    """The parameters in a checkpoint of which a layer's matrix `(inner, outer)` consists.

    Attributes:
        parts: The parts `(inner, columns)` of the matrix, and the columns of each part.
        factor: The number by which the layer multiplies the parameters.
    """

    parts: tuple[tuple[CheckpointPart, slice], ...]
    factor: float


@dataclass(frozen=True, slots=True)
class QuantizableLayer:
    """A product of an activation with a constant matrix.

    Attributes:
        node: The `MatMul` or `Gemm` node.
        name: The name of the module that the node belongs to; the node's name if the module is unknown.
    """

    node: ir.Node
    name: str

    @property
    def activation(self) -> ir.Value:
        """The activation that is multiplied, `(..., inner)`."""
        value = self.node.inputs[0]
        assert value is not None
        return value

    @property
    def weight_key(self) -> object:
        """A key that is equal for layers of one graph with the same matrix; valid until unused nodes are removed."""
        attributes = self.node.attributes
        transposed = producer(self.node.inputs[1], "Transpose")
        source = self.node.inputs[1] if transposed is None else transposed.inputs[0]
        return (
            constant_key(source),
            transposed is not None,
            self.node.op_type == "Gemm" and (attributes.get_int("transB", 0), attributes.get_float("alpha", 1.0)),
        )

    def checkpoint(self) -> CheckpointMatrix | None:
        """Return where the matrix is in the checkpoint, or `None` if the graph contains its values."""
        stored = _stored(self.node.inputs[1])
        tensor = None if stored is None else ir.convenience.get_const_tensor(stored[0])
        if not isinstance(tensor, CheckpointTensor):
            return None
        parts, position = [], 0
        is_gemm = self.node.op_type == "Gemm"
        flipped = (stored is not None and stored[1]) != (is_gemm and bool(self.node.attributes.get_int("transB", 0)))
        for part in tensor.parts:
            view = part.view if isinstance(part, CheckpointPart) else part
            view = view.T if flipped else view
            rows, position = slice(position, position + view.shape[1]), position + view.shape[1]
            if isinstance(part, CheckpointPart):
                parts.append((CheckpointPart(part.weight, view), rows))
        return CheckpointMatrix(tuple(parts), self.node.attributes.get_float("alpha", 1.0) if is_gemm else 1.0)

    def weight(self) -> np.ndarray:
        """Return the matrix `(inner, outer)`, read from disk.

        Raises:
            QuantizeError: The matrix contains infinity or NaN.
        """
        stored = _stored(self.node.inputs[1])
        assert stored is not None
        array = constant(stored[0])
        assert array is not None
        array = array.T if stored[1] else array
        _check_finite(array, self.name)
        if self.node.op_type == "Gemm":
            if self.node.attributes.get_int("transB", 0):
                array = array.T
            alpha = self.node.attributes.get_float("alpha", 1.0)
            if alpha != 1:
                array = array * np.array(alpha, array.dtype)
        return array


@dataclass(frozen=True, slots=True)
class EmbeddingLookup:
    """A lookup of rows in a constant table.

    Attributes:
        node: The `Gather` node.
        name: The name of the module that the node belongs to; the node's name if the module is unknown.
        tied: The layer that multiplies by the transposed table, such as an output layer with tied embeddings; `None` if there is no such
            layer. The layer may be in another graph of the model.
    """

    node: ir.Node
    name: str
    tied: QuantizableLayer | None

    @property
    def table(self) -> ir.Value:
        """The table, `(rows, width) float32`."""
        value = self.node.inputs[0]
        assert value is not None
        return value

    def checkpoint(self) -> CheckpointPart | None:
        """Return where the table is in the checkpoint, or `None` if the graph contains its values."""
        return _parameter(ir.convenience.get_const_tensor(self.table))

    def values(self) -> np.ndarray:
        """Return the table, read from disk.

        Raises:
            QuantizeError: The table contains infinity or NaN.
        """
        array = constant(self.table)
        assert array is not None
        _check_finite(array, self.name)
        return array


def check_operator(operator: str, supported: Sequence[str]) -> None:
    """Check that an operator can be quantized.

    Raises:
        ConfigError: The operator is not in `supported`.
    """
    if operator not in supported:
        raise ConfigError(
            f"The operator {operator!r} cannot be quantized.{did_you_mean(operator, supported)}",
            fix=f"use one of {', '.join(supported)}.",
        )


def find_layers(model: ir.Model, operators: Sequence[str] | None = None) -> list[QuantizableLayer]:
    """Return the products with a constant matrix in the graph and its subgraphs, in order.

    `operators` limits the result to these operator types; by default all of `OPERATORS` are included.
    """
    layers = []
    for node in nodes(model, *(OPERATORS if operators is None else operators)):
        weight = node.inputs[1]
        if weight is None or weight.shape is None or weight.shape.rank() != 2 or _stored(weight) is None:
            continue
        if node.op_type == "Gemm" and node.attributes.get_int("transA", 0):
            continue
        layers.append(QuantizableLayer(node, layer_name(node)))
    return layers


def find_lookups(
    models: Mapping[str, ir.Model], layers: Mapping[str, Sequence[QuantizableLayer]], block_size: int
) -> dict[str, list[EmbeddingLookup]]:
    """Return the lookups in embedding tables that can be quantized, by component name.

    These are lookups in tables that are also the weight of a layer, and lookups of token ids. Other lookups, such as those of positions,
    read small tables, and some of these tables contain sines and cosines instead of weights.

    Args:
        models: The graphs by component name.
        layers: The layers of each graph.
        block_size: The number of weights that share a scale. Rows that would not be smaller after quantization are left out.
    """
    weights = [(layer, *stored) for ours in layers.values() for layer in ours if (stored := _output_weight(layer))]
    lookups: dict[str, list[EmbeddingLookup]] = {}
    for name, model in models.items():
        lookups[name] = []
        for node in nodes(model, LOOKUP):
            table = node.inputs[0]
            if table is None or table.dtype != ir.DataType.FLOAT or node.attributes.get_int("axis", 0):
                continue
            if not is_constant(table) or len(dims(table) or ()) != 2:
                continue
            tied = next((layer for layer, stored, flipped in weights if _is_same(table, stored, flipped)), None)
            width = int(table.shape[1])
            if tied is not None or (
                _is_token_ids(node.inputs[1]) and -(-width // block_size) * (block_size + 4) < 4 * width
            ):
                lookups[name].append(EmbeddingLookup(node, layer_name(node), tied))
    return lookups


def _output_weight(layer: QuantizableLayer) -> tuple[ir.Value, bool] | None:
    """Return the constant with a layer's matrix, and whether its rows belong to the layer's outputs.

    Return `None` if the layer multiplies the matrix by a factor.
    """
    stored = _stored(layer.node.inputs[1])
    if stored is None or (layer.node.op_type == "Gemm" and layer.node.attributes.get_float("alpha", 1.0) != 1):
        return None
    transposed = layer.node.op_type == "Gemm" and bool(layer.node.attributes.get_int("transB", 0))
    return stored[0], stored[1] != transposed


def _is_same(table: ir.Value, weight: ir.Value, flipped: bool) -> bool:
    """Return whether a table and a layer's weight, stored as `(outputs, inputs)` if `flipped` else transposed, have the same values.

    The tracer stores a transposed copy of a small table.
    """
    sizes = dims(weight) or []
    if (sizes if flipped else sizes[::-1]) != dims(table) or weight.dtype != table.dtype:
        return False
    if flipped and constant_key(table) == constant_key(weight):
        return True
    parts = [_parameter(ir.convenience.get_const_tensor(value)) for value in (table, weight)]
    if parts[0] is not None and parts[1] is not None:
        return parts[0].weight.address == parts[1].weight.address
    rows, others = constant(table), constant(weight)
    assert rows is not None
    assert others is not None
    others = others if flipped else others.T
    return np.array_equal(rows[:_COMPARED_ROWS], others[:_COMPARED_ROWS]) and np.array_equal(rows, others)


def _parameter(tensor: ir.TensorProtocol | None) -> CheckpointPart | None:
    """Return the parameter in a checkpoint that a weight consists of, or `None` if it is not a complete parameter."""
    if not isinstance(tensor, CheckpointTensor) or len(tensor.parts) != 1:
        return None
    part = tensor.parts[0]
    return part if isinstance(part, CheckpointPart) and part.view.nbytes == part.weight.nbytes else None


def _is_token_ids(value: ir.Value | None) -> bool:
    """Return whether a value consists of token ids, an input of the graph. The ids may be cast, reshaped, limited or partly replaced."""
    values, inputs = [value], set[str]()
    while values:
        value = values.pop()
        if value is None or is_constant(value):
            continue
        node = value.producer()
        if node is None:
            inputs.add(str(value.name))
        elif node.op_type in _OF_IDS:
            values += node.inputs[:1] if node.op_type in _FIRST_INPUT else node.inputs
        else:
            return False
    return len(inputs) == 1 and inputs.pop().endswith("input_ids")


def constant_key(value: ir.Value | None) -> object:
    """Return the key of a constant's tensor; constants with the same tensor have equal keys (see `editing.identity`)."""
    assert value is not None
    return identity(ir.convenience.get_const_tensor(value))


def _stored(value: ir.Value | None) -> tuple[ir.Value, bool] | None:
    """Return the constant that contains a matrix, and whether a node transposes it (an output layer with tied embeddings).

    Return `None` for values that are not constant. The constant is not read.
    """
    if value is not None and is_constant(value):
        return value, False
    transpose = producer(value, "Transpose")
    source = transpose.inputs[0] if transpose is not None else None
    if transpose is None or source is None or not is_constant(source):
        return None
    flipped = list(transpose.attributes.get_ints("perm", [1, 0])) == [1, 0]
    return (source, True) if flipped and len(dims(source) or ()) == 2 else None


def _check_finite(matrix: np.ndarray, name: str) -> None:
    """Raise if a layer's weight contains infinity or NaN."""
    if not _is_finite(matrix):
        raise QuantizeError(
            f"The weight of the layer {name} contains infinite or NaN values, which cannot be quantized.",
            fix=f"use a model without such weights, or exclude the layer: exclude=({name!r},).",
        )


def _is_finite(matrix: np.ndarray) -> bool:
    """Return whether all numbers are finite; parts are checked one after another, which needs little memory."""
    rows = matrix.T if matrix.flags.f_contiguous else matrix
    count = max(2**16 // max(rows.shape[1], 1), 1)
    return all(np.isfinite(rows[start : start + count]).all() for start in range(0, len(rows), count))


def split_excluded(layers: Sequence[_Named], patterns: Sequence[str]) -> tuple[list[_Named], list[_Named]]:
    """Split layers into those to quantize and those to keep in floating point.

    A pattern is the name of a node or of a layer, or the prefix `re:` and a regular expression. The regular expression
    is searched in the node name and in the layer name. A product of several layers is excluded if a pattern matches one
    of them.

    Raises:
        ConfigError: A pattern matches no layer.
        QuantizeError: No layer is left to quantize.
    """
    names = [(layer.name, *layer.name.split("+"), str(layer.node.name)) for layer in layers]
    excluded = matched_layers(patterns, names)
    included = [layer for i, layer in enumerate(layers) if i not in excluded]
    if not included:
        raise QuantizeError(
            "No layer is left to quantize: "
            + (
                f"exclude=... matches all {len(layers)} layers."
                if layers
                else "the graph has no matrix product with constant weights (MatMul, Gemm)."
            ),
            fix="exclude fewer layers." if layers else "quantize a graph that has linear layers.",
        )
    return included, [layer for i, layer in enumerate(layers) if i in excluded]
