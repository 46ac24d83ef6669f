"""Forms of a graph with fused attention that differ in how they are told about padding.

The graph in an artifact takes the padding mask as it is: `(batch, sequence)`, right for any mask. ONNX Runtime's CUDA
kernels are twice as fast when they get the length of each row instead (roberta-base 16x384 on an H200: 3.1 against
6.7 ms), which says the same only where padding stands on the right; and faster again without any mask, where there is no
padding. A session opens these forms of the same file beside the general one and picks by what a call's mask holds.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes

from .gpu_attention import MASK_NAME, ROWS_NAME
from .graphs import MICROSOFT, add_initializer, replace_value

Form = Literal["general", "lengths", "full"]
"""`general`: any mask. `lengths`: each row keeps its first tokens, at least one. `full`: every token is kept."""
_MASK_INPUT = {"Attention": 3, "MultiHeadAttention": 4}


def form_of(mask: torch.Tensor) -> Form:
    """The fastest form that is right for a `(batch, sequence)` mask on the host."""
    kept = mask != 0
    if bool(kept.all()):
        return "full"
    if bool(kept[:, 0].all()) and not bool((kept[:, 1:] > kept[:, :-1]).any()):
        return "lengths"
    return "general"


def flags_of(mask: torch.Tensor) -> torch.Tensor:
    """What `form_of` looks at, computed where the mask is, without waiting for it: `(2,) int64`.

    The smallest number of leading tokens that any row keeps, and the number of tokens kept behind a gap.
    """
    kept = mask != 0
    leading = kept.cumprod(1).sum(1)
    return torch.stack((leading.amin(), kept.sum() - leading.sum()))


def form_of_flags(flags: tuple[int, int], sequence: int) -> Form:
    """`form_of` from what `flags_of` found."""
    leading, behind_gap = flags
    if behind_gap or leading < 1:
        return "general"
    return "full" if leading == sequence else "lengths"


def mask_input(path: Path) -> str | None:
    """The graph input that fused attention takes its padding from, or `None` when there are no other forms."""
    model = _load(path)
    mask = _find(model, MASK_NAME)
    value = mask
    while value is not None and value.producer() is not None:
        node = value.producer()
        if node is None or node.op_type != "Cast":
            return None
        value = node.inputs[0]
    if value is None or not value.is_graph_input() or mask is None:
        return None
    takers = [use.node for use in mask.uses()]
    return str(value.name) if any(node.op_type in _MASK_INPUT for node in takers) else None


def in_form(path: Path, form: Form) -> bytes:
    """The graph of a file in another form, as a serialized model whose weights stay in the files beside it."""
    model = _load(path)
    mask = _find(model, MASK_NAME)
    if form != "general" and mask is not None:
        for rows in _uses_of(_find(model, ROWS_NAME)):
            if rows.op_type == "Where" and rows.inputs[1] is not None:
                replace_value(rows.outputs[0], rows.inputs[1])
        lengths = _lengths(model.graph, mask) if form == "lengths" else None
        for node in _uses_of(mask):
            position = _MASK_INPUT.get(node.op_type)
            if node.domain == MICROSOFT and position is not None and node.inputs[position] is mask:
                node.replace_input_with(position, lengths)
        passes.RemoveUnusedNodesPass()(model)
    serialized: bytes = ir.to_proto(model).SerializeToString()
    return serialized


def _load(path: Path) -> ir.Model:
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)
    return ir.load(path)


def _uses_of(value: ir.Value | None) -> list[ir.Node]:
    return [use.node for use in value.uses()] if value is not None else []


def _find(model: ir.Model, name: str) -> ir.Value | None:
    return next((output for node in model.graph for output in node.outputs if output.name == name), None)


def _lengths(graph: ir.Graph, mask: ir.Value) -> ir.Value:
    """Tokens kept in each row: `(batch,) int32`."""
    axis = add_initializer(graph, "accel.mask_axis", np.array([1], np.int64))
    total = ir.node("ReduceSum", [mask, axis], {"keepdims": 0}, name="accel.lengths")
    total.outputs[0].type = ir.TensorType(ir.DataType.INT32)
    assert mask.shape is not None
    total.outputs[0].shape = ir.Shape([mask.shape[0]])
    maker = mask.producer()
    assert maker is not None
    graph.insert_after(maker, total)
    return total.outputs[0]
