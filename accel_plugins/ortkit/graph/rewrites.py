"""Graph rewrites as passes of onnx_ir, with checks before (preconditions) and after (postconditions)."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult, PostconditionError, PreconditionError
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .editing import nodes


class Rewrite(InPlacePass):  # type: ignore[misc]  # mypy skips onnx_ir
    """A pass that rewrites a graph in place; the graph still computes the same result.

    Before the rewrite, all inputs and outputs must have names. After it, inputs and outputs have the same names, data
    types, fixed sizes and order, each value is produced before it is read, and the graph has no unused nodes.

    Args:
        name: The name of the rewrite, for error messages.
        rewrite: A function that changes the graph and returns the number of changed places.

    Attributes:
        count: The number of places that the last call changed.
    """

    def __init__(self, name: str, rewrite: Callable[[ir.Model], int]) -> None:
        self._name = name
        self._rewrite = rewrite
        self._signature: Signature = []
        self.count = 0

    def requires(self, model: ir.Model) -> None:
        """Check that all inputs and outputs have names."""
        self._signature = _signature(model)
        if not all(name for name, *_ in self._signature):
            raise PreconditionError(
                f"The graph rewrite {self._name!r} cannot run: an input or output of the graph has no name."
            )

    def call(self, model: ir.Model) -> PassResult:
        """Rewrite the graph and remove the nodes that are unused afterwards."""
        self.count = self._rewrite(model)
        RemoveUnusedNodesPass()(model)
        return PassResult(model, modified=self.count > 0)

    def ensures(self, model: ir.Model) -> None:
        """Check that inputs and outputs did not change and that each value is produced before it is read."""
        after = _signature(model)
        if not _is_kept(self._signature, after, len(model.graph.inputs)):
            raise PostconditionError(
                f"The graph rewrite {self._name!r} changed the inputs or outputs of the graph from {self._signature} to {after}."
            )
        unmade = _read_before_made(model.graph, set())
        if unmade is not None:
            raise PostconditionError(
                f"After the graph rewrite {self._name!r}, a node reads {unmade} before another node produces it."
            )

    def apply(self, model: ir.Model) -> int:
        """Run the pass and return the number of changed places."""
        self(model)
        return self.count


Signature = list[tuple[str | None, str, tuple[object, ...] | None]]
"""List of (name, data type, sizes) of the inputs, then of the outputs; unknown sizes are `None`."""


def _signature(model: ir.Model) -> Signature:
    return [
        (v.name, str(v.type), None if v.shape is None else tuple(getattr(size, "value", size) for size in v.shape))
        for v in (*model.graph.inputs, *model.graph.outputs)
    ]


def _is_kept(before: Signature, after: Signature, inputs: int) -> bool:
    """Return whether inputs and outputs are the same, except for sizes that were unknown before.

    An output size with a symbolic name counts as unknown: shape inference may replace it by a number or an input's axis
    name.
    """
    if [item[:2] for item in before] != [item[:2] for item in after]:
        return False
    return all(
        old in (None, new) or (i >= inputs and isinstance(old, str))
        for i, ((*_, sizes), (*_, other)) in enumerate(zip(before, after, strict=True))
        for old, new in zip(sizes or (), other or (), strict=False)
    )


def _read_before_made(graph: ir.Graph, outer: set[ir.Value | None]) -> str | None:
    """Return the first value that is read before a node produces it, or `None`."""
    available = {None, *outer, *graph.inputs, *graph.initializers.values()}
    for node in graph:
        for value in node.inputs:
            if value not in available:
                return str(value)
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH and (
                inner := _read_before_made(attribute.as_graph(), available)
            ):
                return inner
        available.update(node.outputs)
    return next((str(value) for value in graph.outputs if value not in available), None)


Made = Callable[[], Rewrite]
"""A function that creates a pass; each pass holds the count of one run."""


def graph_rewrite(rewrite: Callable[[ir.Model], int]) -> Made:
    """Turn a function into a pass; the function must change a graph and return the number of changed places."""
    return lambda: Rewrite(rewrite.__name__, rewrite)


def node_rewrite(*operators: str, domain: str = "") -> Callable[[Callable[[ir.Node], bool]], Made]:
    """Turn a function that rewrites one node into a pass; the function must return whether it changed the node.

    The pass calls the function for every node with one of these operator types.
    """

    def decorate(rewrite: Callable[[ir.Node], bool]) -> Made:
        def every(model: ir.Model) -> int:
            return sum(rewrite(node) for node in nodes(model, *operators, domain=domain))

        return lambda: Rewrite(rewrite.__name__, every)

    return decorate
