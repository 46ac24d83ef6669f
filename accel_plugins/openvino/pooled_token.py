"""Graph optimization: after the last attention, compute the layers only for the token that a head reads (`[CLS]`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openvino as ov
import openvino.opset13 as operators

_TOKENS = 1
"""Index of the token axis in shapes `(rows, tokens, features)`."""

_ALONE = {
    "Gelu", "Relu", "Tanh", "Sigmoid", "Swish", "Mish", "HSwish", "Erf", "Exp", "Sqrt", "Abs", "Elu", "SoftPlus", "Clamp",
    "Convert",
}  # fmt: skip
_TOGETHER = {"Add", "Subtract", "Multiply", "Divide", "Power", "SquaredDifference", "FakeQuantize"}
# Operators that work along the axes given by their second input.
_ALONG = {"MVN", "ReduceMean"}


def compute_pooled_token(model: ov.Model) -> None:
    """Move the selection of a token before the operators whose results are read only at that token.

    This saves an eighth of the arithmetic of a model with 6 layers. The results do not change, because these operators
    compute each token separately.
    """
    changed = False
    for gather in [node for node in model.get_ops() if node.get_type_name() == "Gather"]:
        index = _index(gather)
        if index is not None and (nodes := _needed_for(gather)):
            _take_before(gather, index, nodes)
            changed = True
    if changed:
        model.validate_nodes_and_infer_types()


def _index(gather: ov.Node) -> int | None:
    """Return the index of the token that a Gather node selects. Return `None` if the node selects no token, or if the
    index is not constant.
    """
    index, axis = (_constant(gather.input_value(i)) for i in (1, 2))
    if index is None or axis is None or index.ndim or int(axis) != _TOKENS or not _is_tokens(gather.input_value(0)):
        return None
    return int(index)


def _constant(value: ov.Output) -> np.ndarray | None:
    node = value.get_node()
    if node.get_type_name() == "Range":
        # In graphs from ONNX, the axes of LayerNormalization are a Range.
        ends = [int(end) for end in map(_constant, node.input_values()) if end is not None]
        return np.arange(*ends) if len(ends) == 3 else None
    return node.get_data() if node.get_type_name() == "Constant" else None


def _is_tokens(value: ov.Output) -> bool:
    shape = value.get_partial_shape()
    return bool(shape.rank.is_static and len(shape) == 3 and shape[_TOKENS] != 1)


def _is_alike(value: ov.Output) -> bool:
    """Return whether a tensor has the same values for each token, because it has no token axis or one of size 1."""
    shape = value.get_partial_shape()
    return bool(shape.rank.is_static and (len(shape) < 2 or (len(shape) <= 3 and shape[len(shape) - 2] == 1)))


def _token_inputs(node: ov.Node) -> list[int]:
    """Return the indices of a node's inputs that have a token axis; an empty list if the node mixes tokens."""
    kind, values = node.get_type_name(), node.input_values()
    tokens = [i for i, value in enumerate(values) if _is_tokens(value)]
    if not _is_tokens(node.output(0)):
        return []
    if kind in _ALONE:
        return tokens
    if kind in _TOGETHER:
        return tokens if all(i in tokens or _is_alike(value) for i, value in enumerate(values)) else []
    if kind == "MatMul":
        weight = values[1].get_partial_shape()
        turned = node.get_attributes()["transpose_a"]
        return tokens if tokens == [0] and weight.is_static and len(weight) == 2 and not turned else []
    axes = _constant(values[1]) if kind in _ALONG else None
    features = axes is not None and all(int(axis) in (-1, 2) for axis in axes.flatten())
    return tokens if tokens == [0] and features else []


def _readers(node: ov.Node) -> Iterator[ov.Node]:
    for output in node.outputs():
        for reader in output.get_target_inputs():
            yield reader.get_node()


def _needed_for(gather: ov.Node) -> list[ov.Node]:
    """Return the nodes before `gather` that compute many tokens although only the token of `gather` is read."""
    nodes: dict[str, ov.Node] = {}
    waiting = [gather.input_value(0).get_node()]
    while waiting:
        node = waiting.pop()
        inputs = _token_inputs(node)
        if inputs and node.get_name() not in nodes:
            nodes[node.get_name()] = node
            waiting += [node.input_value(i).get_node() for i in inputs]
    while True:
        readers = {gather.get_name(), *nodes}
        others = [
            name for name, node in nodes.items() if any(reader.get_name() not in readers for reader in _readers(node))
        ]
        if not others:
            return list(nodes.values())
        for name in others:
            del nodes[name]


def _take_before(gather: ov.Node, index: int, nodes: list[ov.Node]) -> None:
    inside = {node.get_name() for node in nodes}
    gathered: dict[tuple[str, int], ov.Output] = {}
    for node in nodes:
        for i in _token_inputs(node):
            source = node.input_value(i)
            if source.get_node().get_name() in inside:
                continue
            key = (source.get_node().get_name(), source.get_index())
            if key not in gathered:
                gathered[key] = operators.gather(
                    source, operators.constant([index]), operators.constant(_TOKENS)
                ).output(0)
            node.input(i).replace_source_output(gathered[key])
    gather.input(1).replace_source_output(operators.constant(0).output(0))
