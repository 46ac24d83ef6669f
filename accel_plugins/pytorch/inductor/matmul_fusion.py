"""Graph pass that joins operations which PyTorch's compiler computes separately on GPUs: several matrix products of the
same input, and a matrix product and its activation.

A cuBLAS kernel can add the bias and apply the activation before it writes the result. Without this pass, the compiler
generates a second kernel for bias and activation, which reads and writes the widest tensors of a layer again.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn.functional import gelu, linear, relu

from ..upstream import activated_product, is_traceable_wrapper_subclass
from . import float8, weight_only
from . import fusible_layers as joining
from .fusible_layers import side_by_side, spans_of
from .precision import HALF
from .upstream import CustomGraphPass, get_hash_for_files

# Activations that cuBLAS can compute with a matrix product, and whether each is GELU. cuBLAS computes GELU with `tanh`;
# the difference from the exact GELU is smaller than the error of rounding to 16 bits.
_ACTIVATIONS = {gelu: True, relu: False, torch.relu: False}


def join_projections(model: torch.nn.Module) -> None:
    """Store the weights of neighbouring linear layers with the same number of inputs in one tensor.

    The values of the weights and the outputs of the model do not change. The parameters are replaced by views of the
    joined tensor, so no other code may use the model's parameters.
    """
    holders = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for parent in model.modules():
        for layers in side_by_side(parent):
            unshared = [
                layer for layer in layers if all(holders[id(parameter)] == 1 for parameter in layer.parameters())
            ]
            if len(unshared) > 1:
                _join(unshared)


def _join(layers: list[torch.nn.Linear]) -> None:
    weight = torch.cat([linear_layer.weight.detach() for linear_layer in layers])
    bias = None if layers[0].bias is None else torch.cat([linear_layer.bias.detach() for linear_layer in layers])
    start = 0
    for layer in layers:
        rows = slice(start, start + layer.out_features)
        start = rows.stop
        layer.weight = torch.nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            layer.bias = torch.nn.Parameter(bias[rows], requires_grad=False)
        layer.forward = _WeightSliceForward(weight, bias, rows)  # type: ignore[method-assign, assignment]


class _WeightSliceForward:
    """Forward function of a linear layer whose weight is a slice of a tensor with the weights of several layers.
    `MatmulFusionPass` recognizes the slice in the graph.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rows: slice) -> None:
        self.weight, self.bias, self.rows = weight, bias, rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight[self.rows], None if self.bias is None else self.bias[self.rows])

    def __deepcopy__(self, memo: dict[int, Any]) -> _WeightSliceForward:
        return self


class MatmulFusionPass(CustomGraphPass):
    """Graph pass that joins matrix products of the same input, and that joins activations with the product before them."""

    def __call__(self, graph: Graph) -> None:
        """Change a graph before the compiler decomposes its functions."""
        join_products(graph)
        activate_in_products(graph)
        float8.activate_before_rounding(graph)

    def uuid(self) -> Any:
        """Return the key of this version of the pass for the compiler's cache."""
        return get_hash_for_files((__file__, float8.__file__, weight_only.__file__, joining.__file__))


def join_products(graph: Graph) -> None:
    """Replace linear layers by one linear layer and slices of its output. The layers must have the same input, and
    their weights must be adjacent row slices of the same tensor.
    """
    groups: dict[Any, list[tuple[int, int, Node]]] = defaultdict(list)
    spans = spans_of(graph)
    for target in (linear, float8.LINEAR, weight_only.LINEAR):
        for node in graph.find_nodes(op="call_function", target=target):
            if len(node.args) < 2 or node.kwargs:
                continue
            # `read` contains the weight, the scales of the weight for quantized layers, and the bias.
            x, *read = node.args
            slices = [None if argument is None else _rows(argument) for argument in read]
            rows = slices[0]
            if rows is not None and all(
                argument is None or other == rows for argument, other in zip(read, slices, strict=True)
            ):
                sources = tuple(None if argument is None else argument.args[0] for argument in read)
                groups[target, x, sources, spans[node]].append((rows.start, rows.stop, node))
    for (target, x, sources, _), pieces in groups.items():
        for run in _runs(sorted(pieces, key=lambda piece: piece[:2])):
            _one_product(graph, target, x, sources, run)


def _rows(node: Any) -> slice | None:
    """Return the row slice that a node takes from a tensor, or `None` if the node is not a slice of rows."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return None
    index = node.args[1]
    return index if isinstance(index, slice) and index.step is None and isinstance(index.start, int) else None


def _runs(pieces: list[tuple[int, int, Node]]) -> list[list[tuple[int, int, Node]]]:
    """Return groups of two or more layers whose weight rows are adjacent."""
    runs: list[list[tuple[int, int, Node]]] = []
    for piece in pieces:
        if runs and runs[-1][-1][1] == piece[0]:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [run for run in runs if len(run) > 1]


def _one_product(
    graph: Graph, target: Any, x: Node, sources: tuple[Node | None, ...], run: list[tuple[int, int, Node]]
) -> None:
    nodes = {node for _, _, node in run}
    first, start, stop = next(node for node in graph.nodes if node in nodes), run[0][0], run[-1][1]
    with graph.inserting_before(first):
        rows = [
            None if source is None else graph.call_function(operator.getitem, (source, slice(start, stop)))
            for source in sources
        ]
        product = graph.call_function(target, (x, *rows))
        if (value := _value(first)) is not None:
            product.meta["example_value"] = value.new_empty(*value.shape[:-1], stop - start)
        for begin, end, node in run:
            columns: Any = (..., slice(begin - start, end - start))
            part = graph.call_function(operator.getitem, (product, columns))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
    for node in nodes:
        graph.erase_node(node)


def activate_in_products(graph: Graph, device: str = "cuda") -> None:
    """Replace each linear layer and the activation after it by one operation, if the data type has 16 bits and only the
    activation reads the output of the layer.
    """
    spans = spans_of(graph)
    for node in [
        candidate
        for candidate in graph.nodes
        if candidate.op == "call_function" and candidate.target in _ACTIVATIONS and candidate.args
    ]:
        product, value = node.args[0], _value(node)
        if not isinstance(product, Node) or product.target is not linear or len(product.users) > 1 or value is None:
            continue
        if len(product.args) < 2 or product.kwargs or spans[product] != spans[node]:
            continue
        x, weight, bias = (*product.args, None)[:3]
        read, weights = _value(x), _value(weight)
        if bias is None or read is None or value.dtype not in HALF or value.device.type != device:
            continue
        # Skip quantized weights, because their tensor classes compute matrix products differently.
        if weights is None or is_traceable_wrapper_subclass(weights):
            continue
        if node.kwargs.get("inplace") or not all(isinstance(size, int) for size in value.shape):
            continue
        with graph.inserting_before(node):
            turned = graph.call_method("t", (weight,))
            flat = graph.call_method("reshape", (x, -1, read.shape[-1])) if value.ndim != 2 else x
            activated = graph.call_function(
                activated_product, (bias, flat, turned), {"use_gelu": _ACTIVATIONS[node.target]}
            )
            output = graph.call_method("reshape", (activated, *value.shape)) if value.ndim != 2 else activated
        output.meta = dict(node.meta)
        node.replace_all_uses_with(output)
        graph.erase_node(node)
        graph.erase_node(product)


def _value(node: Any) -> torch.Tensor | None:
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    return example if isinstance(example, torch.Tensor) else None
