"""Forms of a graph with fused attention that differ in how they are told about padding.

The graph in an artifact takes the padding mask as it is: `(batch, sequence)`, right for any mask. ONNX Runtime's CUDA
kernels are twice as fast when they get the length of each row instead (roberta-base 16x384 on an H200: 3.1 against
6.7 ms), which says the same only where padding stands on the right; faster again without any mask, where there is no
padding; and where there is much of it, without computing it at all (`packing`). A session opens these forms of the same
file beside the general one, over the same weights, and picks by what a call's mask holds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes

from ...ortkit.graph.analysis import made_by_name, readers
from ...ortkit.graph.editing import MICROSOFT, add_initializer, insert_after, read_graph, replace_value
from ...ortkit.optimization.padding import MASK_NAME, ROWS_NAME
from .packing import can_pack, pack, packed_rows

Form = Literal["general", "lengths", "full", "short", "packed"]
"""`general`: any mask. `lengths`: each row keeps its first tokens, at least one. `full`: every token is kept. `short`: as
`full`, with the attention kernel for short rows. `packed`: as `lengths`, computed on the tokens alone."""
_MASK_INPUT = {"Attention": 3, "MultiHeadAttention": 4}

# Measured on an H200, see docs/backends/cuda.md.
PACKED_FROM = 1024
"""Places (batch times sequence) from which on packing is worth it: fewer do not fill the GPU."""
PACKED_UP_TO = 0.75
"""Largest share of the places that a packed call may compute."""
SHORT_UP_TO = 64
"""Longest row for which ONNX Runtime's memory-efficient attention is faster than cuDNN's."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a mask holds: the fastest form that is right for it at any size, and its tokens."""

    form: Form
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How a call is computed: the form of the graph, and for `packed` the number of rows."""

    form: Form
    rows: int = 0


def counting_weights(sequence: int, device: torch.device | None = None) -> torch.Tensor:
    """What `flags_of` multiplies a row with: ones, and the places' numbers: `(sequence, 2) int64`."""
    places = torch.arange(sequence, device=device)
    return torch.stack((torch.ones_like(places), places), dim=1)


_host_weights = functools.lru_cache(maxsize=64)(counting_weights)


def flags_of(mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each row's number of tokens and the sum of their places, computed where the mask is: `(batch, 2) int64`.

    A row's tokens stand at its beginning exactly when that sum is the smallest that so many places can have. Three kernels.
    """
    return (mask.ne(0).unsqueeze(-1) * weights).sum(1)


def held_by_flags(flags: np.ndarray, sequence: int) -> Held:
    """What the mask held from which `flags: (batch, 2) int64` come; see `flags_of`."""
    counts, places = flags[:, 0], flags[:, 1]
    tokens = int(counts.sum())
    if tokens == flags.shape[0] * sequence:
        return Held("full", tokens)
    if counts.min() >= 1 and (places * 2 == counts * (counts - 1)).all():
        return Held("lengths", tokens)
    return Held("general", tokens)


def held_by(mask: torch.Tensor) -> Held:
    """What a `(batch, sequence)` mask holds; waits for it where it is on a GPU."""
    sequence = mask.shape[1]
    # Those of the host are kept; on a GPU they would have to be waited for by every stream that reads them.
    weights = counting_weights(sequence, mask.device) if mask.is_cuda else _host_weights(sequence)
    return held_by_flags(flags_of(mask, weights).cpu().numpy(), sequence)


def plan_for(held: Held, shape: Sequence[int], *, packs: bool, short: bool) -> Plan:
    """The fastest way to compute a call.

    Args:
        held: What its mask holds.
        shape: The mask's: batch, sequence.
        packs: Whether the graph has a packed form.
        short: Whether there is an attention kernel for short rows.
    """
    batch, sequence = shape
    places = batch * sequence
    if short and held.form == "full" and sequence <= SHORT_UP_TO:
        return Plan("short")
    if packs and held.form == "lengths" and places >= PACKED_FROM:
        rows = packed_rows(held.tokens, places)
        if rows <= PACKED_UP_TO * places:
            return Plan("packed", rows)
    return Plan(held.form)


def packs(path: Path) -> bool:
    """Whether the graph of a file has a packed form that is worth it: in float16, for which there are packed kernels."""
    model = read_graph(path)
    mask = made_by_name(model.graph, MASK_NAME)
    if mask is None or mask_input(path) is None or not can_pack(model, mask):
        return False
    weights = [node.inputs[1] for node in model.graph if node.op_type == "Attention"]
    return all(weight is not None and weight.dtype == ir.DataType.FLOAT16 for weight in weights)


def mask_input(path: Path) -> str | None:
    """The graph input that fused attention takes its padding from, or `None` when there are no other forms."""
    model = read_graph(path)
    mask = made_by_name(model.graph, MASK_NAME)
    value = mask
    while value is not None and value.producer() is not None:
        node = value.producer()
        if node is None or node.op_type != "Cast":
            return None
        value = node.inputs[0]
    if value is None or not value.is_graph_input() or mask is None:
        return None
    return str(value.name) if any(node.op_type in _MASK_INPUT for node in readers(mask)) else None


def in_form(path: Path, form: Form) -> bytes:
    """The graph of a file in another form, as a serialized model whose weights stay in the files beside it."""
    model = read_graph(path)
    mask = made_by_name(model.graph, MASK_NAME)
    if form != "general" and mask is not None:
        for rows in readers(made_by_name(model.graph, ROWS_NAME)):
            if rows.op_type == "Where" and rows.inputs[1] is not None:
                replace_value(rows.outputs[0], rows.inputs[1])
        if form == "packed":
            pack(model, mask)
        else:
            lengths = _lengths(model.graph, mask) if form == "lengths" else None
            for node in readers(mask):
                position = _MASK_INPUT.get(node.op_type)
                if node.domain == MICROSOFT and position is not None and node.inputs[position] is mask:
                    node.replace_input_with(position, lengths)
        passes.RemoveUnusedNodesPass()(model)
    serialized: bytes = ir.to_proto(model).SerializeToString()
    return serialized


def _lengths(graph: ir.Graph, mask: ir.Value) -> ir.Value:
    """Tokens kept in each row: `(batch,) int32`."""
    axis = add_initializer(graph, "accel.mask_axis", np.array([1], np.int64))
    total = ir.node("ReduceSum", [mask, axis], {"keepdims": 0}, name="accel.lengths")
    total.outputs[0].type = ir.TensorType(ir.DataType.INT32)
    assert mask.shape is not None
    total.outputs[0].shape = ir.Shape([mask.shape[0]])
    insert_after(mask, graph, [total])
    return total.outputs[0]
