"""Decoders with ONNX Runtime's `GroupQueryAttention`, as onnxruntime-genai's builder and onnx-community's folders have them.

These graphs count the tokens of a row by its mask, which is right where the padding is behind the tokens: transformers'
`generate` pads in front. Each node gets the mask as a bias instead, and every row the whole length; rotary positions
are then shifted by the padding, which changes no difference between two of them. Specification: docs/ContribOperators.md
of ONNX Runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from accel.errors import IntegrityError

from .surgery import make_node

if TYPE_CHECKING:
    import onnx

_OPERATOR = "GroupQueryAttention"
_LENGTHS, _TOTAL, _BIAS = 5, 6, 10
_MASK = "attention_mask"
CAPACITY = "capacity"
"""The axis of a past and a present that are one buffer."""
# The most negative number of each type, by ONNX' number of the type.
_LEAST = {1: -3.4028234663852886e38, 10: -65504.0, 16: -3.3895313892515355e38}


def grouped(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes that count tokens by the mask."""
    return [
        node
        for node in model.graph.node
        if node.op_type == _OPERATOR and (len(node.input) <= _BIAS or not node.input[_BIAS])
    ]


def with_mask(model: onnx.ModelProto, where: Path) -> onnx.ModelProto:
    """The graph, in our words, with a bias from the mask, and past and present as one buffer; changed in place.

    Raises:
        IntegrityError: It takes no mask or no tokens by our names, or keeps a cache that the nodes do not write.
    """
    from onnx import TensorProto, helper

    graph = model.graph
    nodes = grouped(model)
    inputs = {value.name: value for value in graph.input}
    written = {name for node in nodes for name in node.output[1:3]}
    caches = [value for value in graph.output if value.name.startswith("present.")]
    tokens = next((name for name in ("input_ids", "inputs_embeds") if name in inputs), None)
    if _MASK not in inputs or tokens is None or {value.name for value in caches} != written:
        raise IntegrityError(
            f"{where} has attention that counts tokens, and not the inputs and the cache that go with it.",
            fix="export the model again: `accel export MODEL OUT`.",
        )
    dtype = inputs["past_key_values.0.key"].type.tensor_type.elem_type
    for name, value in (("bias_zero", 0), ("bias_one", 1), ("bias_two", 2)):
        graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], [value]))
    graph.initializer.append(helper.make_tensor("bias_least", dtype, [], [_LEAST[dtype]]))
    graph.initializer.append(helper.make_tensor("bias_none", dtype, [], [0.0]))
    made = [
        make_node("Shape", [_MASK], ["bias_rows"], start=0, end=1),
        make_node("Shape", [_MASK], ["bias_total"], start=1, end=2),
        make_node("Shape", [tokens], ["bias_new"], start=1, end=2),
        make_node("Cast", [_MASK], ["bias_seen"], to=TensorProto.BOOL),
        make_node("Where", ["bias_seen", "bias_none", "bias_least"], ["bias_flat"]),
        make_node("Concat", ["bias_one", "bias_two"], ["bias_axes"], axis=0),
        make_node("Unsqueeze", ["bias_flat", "bias_axes"], ["bias_deep"]),
        make_node("Concat", ["bias_rows", "bias_one", "bias_new", "bias_total"], ["bias_shape"], axis=0),
        make_node("Expand", ["bias_deep", "bias_shape"], ["bias"]),
        make_node("Sub", ["bias_total", "bias_one"], ["bias_last"]),
        make_node("Cast", ["bias_last"], ["bias_last_short"], to=TensorProto.INT32),
        make_node("Expand", ["bias_last_short", "bias_rows"], ["bias_lengths"]),
    ]
    for node in nodes:
        node.input[_LENGTHS] = "bias_lengths"
        node.input.extend([""] * (_BIAS + 1 - len(node.input)))
        node.input[_BIAS] = "bias"
    kept = [*made, *graph.node]
    copies = [type(node)() for node in kept]
    for copy, node in zip(copies, kept, strict=True):
        copy.CopyFrom(node)
    del graph.node[:]
    graph.node.extend(copies)
    for value in (*graph.input, *caches):
        if value.name.startswith(("past_key_values.", "present.")):
            value.type.tensor_type.shape.dim[2].dim_param = CAPACITY
    return model
