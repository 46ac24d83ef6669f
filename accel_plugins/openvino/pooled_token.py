"""Layers after the last attention, computed for the token that a head reads (`[CLS]`) instead of for all tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openvino as ov
import openvino.opset13 as operators

_TOKENS = 1
"""The axis of tokens in `(rows, tokens, features)`."""

_ALONE = {
    "Gelu", "Relu", "Tanh", "Sigmoid", "Swish", "Mish", "HSwish", "Erf", "Exp", "Sqrt", "Abs", "Elu", "SoftPlus", "Clamp",
    "Convert",
}  # fmt: skip
_TOGETHER = {"Add", "Subtract", "Multiply", "Divide", "Power", "SquaredDifference", "FakeQuantize"}
# Along the axes that their second input names.
_ALONG = {"MVN", "ReduceMean"}


def compute_pooled_token(model: ov.Model) -> None:
    """Take the token before the products that nothing else needs of the others.

    Of a model with 6 layers that is an eighth of the arithmetic. Answers stay the same: each of these operators treats every
    token alike.
    """
    found = False
    for gather in [node for node in model.get_ops() if node.get_type_name() == "Gather"]:
        index = _index(gather)
        if index is not None and (nodes := _needed_for(gather)):
            _take_before(gather, index, nodes)
            found = True
    if found:
        model.validate_nodes_and_infer_types()


def _index(gather: ov.Node) -> int | None:
    """Which token a node takes; `None` where it is no token, or not the same in each call."""
    index, axis = (_constant(gather.input_value(i)) for i in (1, 2))
    if index is None or axis is None or index.ndim or int(axis) != _TOKENS or not _is_tokens(gather.input_value(0)):
        return None
    return int(index)


def _constant(value: ov.Output) -> np.ndarray | None:
    node = value.get_node()
    if node.get_type_name() == "Range":
        # What axes of LayerNormalization are read from ONNX as.
        ends = [int(one) for one in map(_constant, node.input_values()) if one is not None]
        return np.arange(*ends) if len(ends) == 3 else None
    return node.get_data() if node.get_type_name() == "Constant" else None


def _is_tokens(value: ov.Output) -> bool:
    shape = value.get_partial_shape()
    return bool(shape.rank.is_static and len(shape) == 3 and shape[_TOKENS] != 1)


def _is_alike(value: ov.Output) -> bool:
    """Whether a tensor beside tokens is the same for each of them."""
    shape = value.get_partial_shape()
    return bool(shape.rank.is_static and (len(shape) < 2 or (len(shape) <= 3 and shape[len(shape) - 2] == 1)))


def _token_inputs(node: ov.Node) -> list[int]:
    """Which inputs hold tokens; none where the node mixes them."""
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
    """The nodes before one that takes a token, of which nothing else needs the other tokens."""
    found: dict[str, ov.Node] = {}
    waiting = [gather.input_value(0).get_node()]
    while waiting:
        node = waiting.pop()
        inputs = _token_inputs(node)
        if inputs and node.get_name() not in found:
            found[node.get_name()] = node
            waiting += [node.input_value(i).get_node() for i in inputs]
    while True:
        known = {gather.get_name(), *found}
        others = [name for name, node in found.items() if any(one.get_name() not in known for one in _readers(node))]
        if not others:
            return list(found.values())
        for name in others:
            del found[name]


def _take_before(gather: ov.Node, index: int, nodes: list[ov.Node]) -> None:
    inside = {node.get_name() for node in nodes}
    taken: dict[tuple[str, int], ov.Output] = {}
    for node in nodes:
        for i in _token_inputs(node):
            source = node.input_value(i)
            if source.get_node().get_name() in inside:
                continue
            key = (source.get_node().get_name(), source.get_index())
            if key not in taken:
                taken[key] = operators.gather(source, operators.constant([index]), operators.constant(_TOKENS)).output(
                    0
                )
            node.input(i).replace_source_output(taken[key])
    gather.input(1).replace_source_output(operators.constant(0).output(0))
