"""The layers of a graph that a quantizer may rewrite: products with a constant matrix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from accel.errors import ConfigError, QuantizeError, did_you_mean

from ..graph.analysis import producer
from ..graph.editing import constant, identity, layer_name, nodes

OPERATORS = ("MatMul", "Gemm")


@dataclass(frozen=True, slots=True)
class Layer:
    """A product of an activation with a constant matrix.

    Attributes:
        node: `MatMul` or `Gemm`.
        name: The module that it belongs to, where the graph tells; else the node's name.
    """

    node: ir.Node
    name: str

    @property
    def activation(self) -> ir.Value:
        """What is multiplied: `(..., inner)`."""
        value = self.node.inputs[0]
        assert value is not None
        return value

    @property
    def weight_key(self) -> object:
        """A key that is equal for layers of one graph with the same matrix, until the graph is pruned."""
        attributes = self.node.attributes
        transposed = producer(self.node.inputs[1], "Transpose")
        source = self.node.inputs[1] if transposed is None else transposed.inputs[0]
        return (
            constant_key(source),
            transposed is not None,
            self.node.op_type == "Gemm" and (attributes.get_int("transB", 0), attributes.get_float("alpha", 1.0)),
        )

    def weight(self) -> np.ndarray:
        """The matrix `(inner, outer)`, read from disk.

        Raises:
            QuantizeError: It holds infinities, or what is not a number.
        """
        array = _matrix(self.node.inputs[1])
        assert array is not None
        if not np.isfinite(array).all():
            raise QuantizeError(
                f"The weight of {self.name} holds values that are infinite or no numbers.",
                fix="repair the model, or leave the layer out: exclude=...",
            )
        if self.node.op_type == "Gemm":
            if self.node.attributes.get_int("transB", 0):
                array = array.T
            array = array * np.array(self.node.attributes.get_float("alpha", 1.0), array.dtype)
        return array


def find_layers(model: ir.Model, operators: Sequence[str] | None = None) -> list[Layer]:
    """Products with a constant matrix in the graph and its subgraphs, in order.

    Raises:
        ConfigError: An operator type that cannot be quantized.
    """
    wanted = tuple(operators) if operators is not None else OPERATORS
    for operator in wanted:
        if operator not in OPERATORS:
            raise ConfigError(
                f"{operator!r} cannot be quantized.{did_you_mean(operator, OPERATORS)}",
                fix=f"use one of {', '.join(OPERATORS)}.",
            )
    found = []
    for node in nodes(model, *wanted):
        weight = node.inputs[1]
        if weight is None or weight.shape is None or weight.shape.rank() != 2 or _matrix(weight) is None:
            continue
        if node.op_type == "Gemm" and node.attributes.get_int("transA", 0):
            continue
        found.append(Layer(node, layer_name(node)))
    return found


def constant_key(value: ir.Value | None) -> object:
    """`identity` of a constant's tensor."""
    assert value is not None
    return identity(ir.convenience.get_const_tensor(value))


def _matrix(value: ir.Value | None) -> np.ndarray | None:
    """A constant matrix, or a transposed one: a last layer that shares its weights with the embeddings."""
    array = constant(value)
    transpose = producer(value, "Transpose") if array is None else None
    if transpose is None:
        return array
    source = constant(transpose.inputs[0])
    flipped = list(transpose.attributes.get_ints("perm", [1, 0])) == [1, 0]
    return source.T if source is not None and source.ndim == 2 and flipped else None


def split_excluded(layers: Sequence[Layer], patterns: Sequence[str]) -> tuple[list[Layer], list[Layer]]:
    """Layers to quantize and layers left in float.

    A pattern is a node's or a layer's name, or `re:` and a regular expression that is searched in both.

    Raises:
        ConfigError: A pattern that matches nothing, or is no regular expression.
    """
    excluded: set[int] = set()
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                compiled = re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise ConfigError(f"exclude holds {pattern!r}, which is no regular expression: {error}.") from error
            matched = [
                i
                for i, layer in enumerate(layers)
                if compiled.search(layer.name) or compiled.search(str(layer.node.name))
            ]
        else:
            matched = [i for i, layer in enumerate(layers) if pattern in (layer.name, layer.node.name)]
        if not matched:
            names = [layer.name for layer in layers]
            raise ConfigError(
                f"exclude holds {pattern!r}, which matches none of the {len(names)} layers.{did_you_mean(pattern, names)}",
                fix=f"use a name such as {', '.join(names[:3])}, or re: and a regular expression.",
            )
        excluded.update(matched)
    kept = [layer for i, layer in enumerate(layers) if i not in excluded]
    if not kept:
        raise QuantizeError(
            "Nothing is left to quantize: "
            + (f"exclude takes all {len(layers)} layers." if layers else "the graph has no product with a constant."),
            fix="exclude fewer layers." if layers else "quantize another graph.",
        )
    return kept, [layer for i, layer in enumerate(layers) if i in excluded]
