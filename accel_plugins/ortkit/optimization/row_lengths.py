"""Decoder graphs whose rows may have lengths of their own.

`GroupQueryAttention` takes the place of each row's last token. In an artifact's graph that is the last column for all rows,
computed from the mask's width. As an input it lets a row stand at the beginning of its buffers whatever the others' lengths
are, so that each is computed just as alone: with padding in front, sums are rounded in another order.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from accel.errors import SessionError

from ..graph.editing import MICROSOFT, nodes, read_graph
from .causal_attention import LENGTHS, take_lengths

_LENGTHS = 5
# A graph with its weights inside, which would be held in memory once more.
_LARGE_BYTES = 256 << 20


def lengths_form(path: Path) -> bytes | None:
    """The serialized graph of a file with the input `accel.lengths (batch,) int32`, its weights in the files beside the original;
    `None` where rows cannot have lengths of their own: attention looks at something else than the tokens up to one's own that
    the mask keeps, or the mask is read elsewhere.
    """
    if path.stat().st_size > _LARGE_BYTES:
        return None
    model = read_graph(path)
    attentions = list(nodes(model, "GroupQueryAttention", domain=MICROSOFT))
    if not attentions:
        return None
    try:
        # A window counts columns.
        if take_lengths(read_graph(path), path.name):
            return None
    except SessionError:
        return None
    lengths = ir.Value(name=LENGTHS, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["batch"]))
    model.graph.inputs.append(lengths)
    for node in attentions:
        node.replace_input_with(_LENGTHS, lengths)
    serialized: bytes = ir.to_proto(model).SerializeToString()
    return serialized
