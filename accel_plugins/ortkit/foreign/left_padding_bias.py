"""Conversion of decoders that use ONNX Runtime's `GroupQueryAttention`, from onnxruntime-genai and onnx-community.

These graphs compute the length of a row from the row's attention mask. The length is correct only if padding comes
after the tokens, but transformers' `generate` adds padding in front of the tokens. The conversion passes the mask to
each node as an attention bias and gives every row the full length. Rotary positions are then shifted by the padding,
which does not change the difference between two positions. Specification: docs/ContribOperators.md of ONNX Runtime.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from accel.errors import IntegrityError

from ..graph.editing import MICROSOFT, add_initializer, nodes

_OPERATOR = "GroupQueryAttention"
_LENGTHS, _TOTAL, _BIAS = 5, 6, 10
_MASK = "attention_mask"
CAPACITY = "capacity"
"""Axis name of the token axis if past and present share one buffer."""


def counting_nodes(model: ir.Model) -> list[ir.Node]:
    """Return the attention nodes that compute row lengths from the mask."""
    attentions = nodes(model, _OPERATOR, domain=MICROSOFT)
    return [node for node in attentions if len(node.inputs) <= _BIAS or node.inputs[_BIAS] is None]


def with_mask(model: ir.Model, where: Path) -> ir.Model:
    """Add an attention bias computed from the mask, and let past and present share one buffer; change the graph in place.

    Args:
        model: The graph, with accel's names.
        where: The path of the graph file, for error messages.

    Raises:
        IntegrityError: The graph has no input with accel's name for the mask or the tokens, or a cache that the
            attention nodes do not write.
    """
    graph, attention = model.graph, counting_nodes(model)
    inputs = {str(value.name): value for value in graph.inputs}
    caches = [value for value in graph.outputs if str(value.name).startswith("present.")]
    written = {value for node in attention for value in node.outputs[1:3]}
    tokens = next((name for name in ("input_ids", "inputs_embeds") if name in inputs), None)
    if _MASK not in inputs or tokens is None or set(caches) != written:
        raise IntegrityError(
            f"{where} has GroupQueryAttention nodes, but lacks the input attention_mask, the input input_ids or inputs_embeds, "
            "or a KV cache that all these nodes write.",
            fix="export the model again: `accel export MODEL OUT`.",
        )
    dtype = inputs["past_key_values.0.key"].dtype
    assert dtype is not None
    mask, tape = inputs[_MASK], ir.tape.Tape()
    one_value, axes = (add_initializer(graph, "bias_axes", np.array(values, np.int64)) for values in ([1], [1, 2]))
    hidden, visible = (add_initializer(graph, "bias", np.array(number, dtype.numpy())) for number in (dtype.min, 0))
    rows = tape.op("Shape", [mask], {"start": 0, "end": 1})
    total = tape.op("Shape", [mask], {"start": 1, "end": 2})
    new_tokens = tape.op("Shape", [inputs[tokens]], {"start": 1, "end": 2})
    flat = tape.op("Where", [tape.op("Cast", [mask], {"to": ir.DataType.BOOL}), visible, hidden])
    shape = tape.op("Concat", [rows, one_value, new_tokens, total], {"axis": 0})
    bias = tape.op("Expand", [tape.op("Unsqueeze", [flat, axes]), shape])
    last_position = tape.op("Cast", [tape.op("Sub", [total, one_value])], {"to": ir.DataType.INT32})
    lengths = tape.op("Expand", [last_position, rows])
    graph.insert_before(graph[0], tape.nodes)
    for node in attention:
        node.resize_inputs(max(len(node.inputs), _BIAS + 1))
        node.replace_input_with(_LENGTHS, lengths)
        node.replace_input_with(_BIAS, bias)
    for value in (*graph.inputs, *caches):
        if str(value.name).startswith(("past_key_values.", "present.")):
            sizes = list(value.shape or ())
            value.shape = ir.Shape([*sizes[:2], CAPACITY, *sizes[3:]])
    return model
