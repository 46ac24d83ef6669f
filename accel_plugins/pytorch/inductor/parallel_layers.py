"""Helpers to find linear layers of a model, or nodes of a graph, that can be computed together."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.fx import Graph, Node


def side_by_side(parent: torch.nn.Module) -> list[list[torch.nn.Linear]]:
    """Return the linear layers of a module in groups of equal input size, data type and device, with or without bias."""
    alike: dict[Any, list[torch.nn.Linear]] = defaultdict(list)
    for layer in parent.children():
        # Skip quantized layers and weights, and layers whose `forward` was replaced.
        if type(layer) is not torch.nn.Linear or "forward" in vars(layer):
            continue
        if all(type(one) is torch.nn.Parameter for one in layer.parameters()):
            weight = layer.weight
            alike[layer.in_features, layer.bias is None, weight.dtype, weight.device].append(layer)
    return list(alike.values())


def spans_of(graph: Graph) -> dict[Node, int]:
    """Return, for each node, the number of earlier nodes that write to their inputs.

    Between two nodes with the same number, no tensor changes its values. The graph is not functionalized, so such
    writes occur.
    """
    spans: dict[Node, int] = {}
    writes = 0
    for node in graph.nodes:
        spans[node] = writes
        writes += node.op in ("call_function", "call_method") and _writes(node)
    return spans


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
    # Functions that write to an input: `x.add_`, `x[0] = ...`, `x += ...`, and calls with `inplace=True` or `out=`.
    own = name.endswith("_") and not name.endswith("__")
    told = any(one is True for one in (*node.args, node.kwargs.get("inplace"))) or node.kwargs.get("out") is not None
    return own or told or name in _IN_PLACE


_IN_PLACE = {"setitem", "delitem", *(f"i{one}" for one in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift", "concat",
))}  # fmt: skip
