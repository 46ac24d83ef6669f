"""Forms of a graph with fused attention that differ in how padding is passed to attention.

The graph in an artifact takes the `(batch, sequence)` padding mask, which is correct for any mask. ONNX Runtime's CUDA
kernels are twice as fast if they get the length of each row instead (roberta-base 16x384 on an H200: 3.1 instead of 6.7
ms). Row lengths are correct only if padding is on the right. Without padding, the graph is even faster without a mask. With
much padding, it is faster not to compute the padding at all (`packing`). A session opens these forms of the same file
next to the general form, with the same weights, and selects a form by the mask of each call.
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

from ...ortkit.graph.analysis import made_by_name, readers, unwrapped
from ...ortkit.graph.editing import MICROSOFT, NewNodes, insert_after, read_graph, replace_value, serialized
from ...ortkit.optimization.padding import MASK_NAME, ROWS_NAME
from .packing import Packer, can_pack, packed_rows

FormName = Literal["general", "lengths", "full", "short", "packed"]
"""`general`: correct for any mask. `lengths`: each row has at least one token, and padding only on the right. `full`:
no padding.
`short`: like `full`, with the attention kernel for short rows. `packed`: like `lengths`, computed without the padding.
"""
_MASK_INPUT = {"Attention": 3, "MultiHeadAttention": 4}

# These limits were measured on an H200; see docs/backends/cuda.md.
PACKED_FROM = 1024
"""Minimum of batch size times sequence length for packing; smaller calls do not keep the GPU busy."""
PACKED_UP_TO = 0.75
"""Maximum fraction of batch size times sequence length that a packed call may compute."""
SHORT_UP_TO = 64
"""Maximum row length for which ONNX Runtime's memory-efficient attention is faster than cuDNN's attention."""


@dataclass(frozen=True, slots=True)
class MaskContent:
    """The content of a padding mask: the fastest form that is correct for it, regardless of the shape, and the number of tokens."""

    form: FormName
    tokens: int


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """The plan for a call: the form of the graph, and for `packed` the number of rows to compute."""

    form: FormName
    rows: int = 0


def counting_weights(sequence: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the weights `(sequence, 2) int64` that `flags_of` multiplies a mask with: ones, and the column numbers."""
    places = torch.arange(sequence, device=device)
    return torch.stack((torch.ones_like(places), places), dim=1)


_host_weights = functools.lru_cache(maxsize=64)(counting_weights)


def flags_of(mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `(batch, 2) int64`: each row's number of tokens and the sum of their column numbers.

    The values are computed on the mask's device with three kernels. All tokens of a row are at its start if and only if
    the sum of their column numbers is the smallest possible sum for that number of tokens.
    """
    return (mask.ne(0).unsqueeze(-1) * weights).sum(1)


def held_by_flags(flags: np.ndarray, sequence: int) -> MaskContent:
    """Return the kind of padding and the number of tokens of a mask, from its `flags: (batch, 2) int64` (see `flags_of`)."""
    counts, places = flags[:, 0], flags[:, 1]
    tokens = int(counts.sum())
    if tokens == flags.shape[0] * sequence:
        return MaskContent("full", tokens)
    if counts.min() >= 1 and (places * 2 == counts * (counts - 1)).all():
        return MaskContent("lengths", tokens)
    return MaskContent("general", tokens)


def held_by(mask: torch.Tensor) -> MaskContent:
    """Return the kind of padding and the number of tokens of a `(batch, sequence)` mask; waits for a mask on a GPU."""
    sequence = mask.shape[1]
    # Only weights in CPU memory are cached: on a GPU, every stream that reads cached weights would have to wait for
    # them.
    weights = counting_weights(sequence, mask.device) if mask.is_cuda else _host_weights(sequence)
    return held_by_flags(flags_of(mask, weights).cpu().numpy(), sequence)


def plan_for(content: MaskContent, shape: Sequence[int], *, packs: bool, short: bool) -> MaskPlan:
    """Return the fastest plan for a call.

    Args:
        content: The content of the call's mask.
        shape: The shape of the mask: batch size, sequence length.
        packs: Whether the graph has a packed form.
        short: Whether there is an attention kernel for short rows.
    """
    batch, sequence = shape
    places = batch * sequence
    if short and content.form == "full" and sequence <= SHORT_UP_TO:
        return MaskPlan("short")
    if packs and content.form == "lengths" and places >= PACKED_FROM:
        rows = packed_rows(content.tokens, places)
        if rows <= PACKED_UP_TO * places:
            return MaskPlan("packed", rows)
    return MaskPlan(content.form)


def packs(path: Path) -> bool:
    """Return whether the graph of a file has a useful packed form: only for float16, which has packed kernels."""
    model = read_graph(path)
    mask = made_by_name(model.graph, MASK_NAME)
    if mask is None or mask_input(path) is None or not can_pack(model, mask):
        return False
    weights = [node.inputs[1] for node in model.graph if node.op_type == "Attention"]
    return all(weight is not None and weight.dtype == ir.DataType.FLOAT16 for weight in weights)


def mask_input(path: Path) -> str | None:
    """Return the name of the graph input from which fused attention gets its padding.

    `None` if the graph has no other forms.
    """
    model = read_graph(path)
    mask = made_by_name(model.graph, MASK_NAME)
    source = unwrapped(mask, "Cast")
    if source is None or not source.is_graph_input():
        return None
    return str(source.name) if any(node.op_type in _MASK_INPUT for node in readers(mask)) else None


def in_form(path: Path, form: FormName) -> bytes:
    """Return the graph of a file in another form, as a serialized model; the weights stay in their files."""
    model = read_graph(path)
    mask = made_by_name(model.graph, MASK_NAME)
    if form != "general" and mask is not None:
        for rows in readers(made_by_name(model.graph, ROWS_NAME)):
            if rows.op_type == "Where" and rows.inputs[1] is not None:
                replace_value(rows.outputs[0], rows.inputs[1])
        if form == "packed":
            Packer(model, mask).run()
        else:
            lengths = _lengths(model.graph, mask) if form == "lengths" else None
            for node in readers(mask):
                position = _MASK_INPUT.get(node.op_type)
                if node.domain == MICROSOFT and position is not None and node.inputs[position] is mask:
                    node.replace_input_with(position, lengths)
        passes.RemoveUnusedNodesPass()(model)
    return serialized(model)


def _lengths(graph: ir.Graph, mask: ir.Value) -> ir.Value:
    """Add the number of tokens in each row to the graph: `(batch,) int32`."""
    new = NewNodes(graph, "accel.lengths")
    assert mask.shape is not None
    total = new.op("ReduceSum", mask, new.constant([1]), keepdims=0, like=mask, shape=[mask.shape[0]])
    insert_after(mask, graph, new.nodes)
    return total
