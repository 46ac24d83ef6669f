"""Rewrites of graphs as passes of onnx_ir, with what they require of a graph and what they ensure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult, PostconditionError, PreconditionError
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .editing import nodes


class Rewrite(InPlacePass):  # type: ignore[misc]  # mypy skips onnx_ir
    """A rewrite of a graph in place, which computes the same.

    Requires inputs and outputs with names. Ensures that inputs and outputs keep their names, types, fixed sizes and order, that each
    value is made before it is read, and that nothing unused is left.

    Args:
        name: Of the rewrite, for errors.
        rewrite: Changes the graph; returns how many places.

    Attributes:
        count: How many places the last call changed.
    """

    def __init__(self, name: str, rewrite: Callable[[ir.Model], int]) -> None:
        self._name = name
        self._rewrite = rewrite
        self._signature: list[_Described] = []
        self.count = 0

    def requires(self, model: ir.Model) -> None:
        """Inputs and outputs have names."""
        self._signature = _signature(model)
        if not all(one.name for one in self._signature):
            raise PreconditionError(f"{self._name}: an input or output has no name.")

    def call(self, model: ir.Model) -> PassResult:
        """Change the graph, and remove what is unused then."""
        self.count = self._rewrite(model)
        RemoveUnusedNodesPass()(model)
        return PassResult(model, modified=self.count > 0)

    def ensures(self, model: ir.Model) -> None:
        """Inputs and outputs are as before, and each value is made before it is read."""
        after = _signature(model)
        if len(after) != len(self._signature) or not all(map(_Described.kept_by, self._signature, after)):
            raise PostconditionError(f"{self._name} changed inputs or outputs: {self._signature} to {after}.")
        unmade = _read_before_made(model.graph, set())
        if unmade is not None:
            raise PostconditionError(f"{self._name}: {unmade} is read before it is made.")

    def apply(self, model: ir.Model) -> int:
        """Run the pass; return how many places it changed."""
        self(model)
        return self.count


@dataclass(frozen=True, slots=True)
class _Described:
    """Name, type and sizes of an input or output; unknown sizes are `None`."""

    name: str | None
    type: str
    sizes: tuple[object, ...] | None
    made: bool

    def kept_by(self, after: _Described) -> bool:
        """Whether another description is the same, except for sizes that were unknown.

        A name that a tool gave to a size of an output tells nothing: what infers shapes may find a number, or the input's name.
        """
        pairs = zip(self.sizes, after.sizes, strict=False) if self.sizes is not None and after.sizes is not None else ()
        known = all(before in (None, size) or (self.made and isinstance(before, str)) for before, size in pairs)
        return (self.name, self.type) == (after.name, after.type) and known


def _signature(model: ir.Model) -> list[_Described]:
    described = []
    inputs = len(model.graph.inputs)
    for i, value in enumerate((*model.graph.inputs, *model.graph.outputs)):
        sizes = None if value.shape is None else tuple(getattr(size, "value", size) for size in value.shape)
        described.append(_Described(value.name, str(value.type), sizes, made=i >= inputs))
    return described


def _read_before_made(graph: ir.Graph, outer: set[ir.Value | None]) -> str | None:
    """The first value that is read before a node makes it."""
    known = {None, *outer, *graph.inputs, *graph.initializers.values()}
    for node in graph:
        for value in node.inputs:
            if value not in known:
                return str(value)
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH and (inner := _read_before_made(attribute.as_graph(), known)):
                return inner
        known.update(node.outputs)
    return next((str(value) for value in graph.outputs if value not in known), None)


Made = Callable[[], Rewrite]
"""Makes a pass, which holds the count of one run."""


def graph_rewrite(rewrite: Callable[[ir.Model], int]) -> Made:
    """A function that changes a graph and returns how many places, as a pass."""
    return lambda: Rewrite(rewrite.__name__, rewrite)


def node_rewrite(*operators: str, domain: str = "") -> Callable[[Callable[[ir.Node], bool]], Made]:
    """A function that rewrites one node of these operators and returns whether it did, as a pass."""

    def decorate(rewrite: Callable[[ir.Node], bool]) -> Made:
        def every(model: ir.Model) -> int:
            return sum(rewrite(node) for node in nodes(model, *operators, domain=domain))

        return lambda: Rewrite(rewrite.__name__, every)

    return decorate
