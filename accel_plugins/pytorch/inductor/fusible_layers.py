"""Helpers to find linear layers of a model, or nodes of a graph, that can be computed together."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.fx import Graph, Node


def side_by_side(parent: torch.nn.Module) -> list[list[torch.nn.Linear]]:
    """Return the linear layers among the children of a module, in groups. The layers of a group have the same number of
    inputs, data type and device, and either all or none of them have a bias.
    """
    groups: dict[Any, list[torch.nn.Linear]] = defaultdict(list)
    for layer in parent.children():
        # Skip quantized layers and weights, and layers whose `forward` was replaced.
        if type(layer) is not torch.nn.Linear or "forward" in vars(layer):
            continue
        if all(type(parameter) is torch.nn.Parameter for parameter in layer.parameters()):
            weight = layer.weight
            groups[layer.in_features, layer.bias is None, weight.dtype, weight.device].append(layer)
    return list(groups.values())


def spans_of(graph: Graph) -> dict[Node, int]:
    """Return, for each node, the number of earlier nodes that write to their inputs.

    Two nodes with the same number see the same values of all tensors, so they can be joined. The graph is not
    functionalized, so it may contain operations that change their inputs.
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
    by_name = name.endswith("_") and not name.endswith("__")
    by_argument = (
        any(argument is True for argument in (*node.args, node.kwargs.get("inplace")))
        or node.kwargs.get("out") is not None
    )
    return by_name or by_argument or name in _IN_PLACE


_IN_PLACE = {"setitem", "delitem", *(f"i{operator_name}" for operator_name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift", "concat",
))}  # fmt: skip
