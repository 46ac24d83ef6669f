"""Forms of an ONNX graph: variants that pass the padding to fused attention in different ways.

The graph in an artifact reads the `(batch, sequence)` attention mask, which is correct for any mask. ONNX Runtime's
CUDA kernels are twice as fast if they get the length of each row instead (roberta-base 16x384 on an H200: 3.1 instead
of 6.7 ms). Row lengths are correct only if padding is on the right. Without padding, the graph is even faster without a
mask. With much padding, it is faster not to compute the padding (`packing`). A session opens the forms with the same
weights, and selects a form by the mask of each call.
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

from accel.artifact.sentence_fields import TOKEN_VECTORS

from ...ortkit.graph.analysis import made_by_name, readers, unwrapped
from ...ortkit.graph.editing import MICROSOFT, NewNodes, insert_after, read_graph, replace_value, serialized
from ...ortkit.optimization.padding_masks import MASK_NAME, ROWS_NAME
from .packing import PackingRewriter, can_pack, packed_rows

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
    """Content of an attention mask: the fastest form of the graph that is correct for the mask, and the number of
    tokens.

    `form` does not depend on the batch size and the sequence length.
    """

    form: FormName
    tokens: int


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """How to compute one call: the form of the graph, and for the form `packed` the number of rows to compute."""

    form: FormName
    rows: int = 0


def counting_weights(sequence: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the matrix `(sequence, 2) int64` that `flags_of` multiplies an attention mask with: a column of ones, and
    a column with the column numbers of the mask.
    """
    places = torch.arange(sequence, device=device)
    return torch.stack((torch.ones_like(places), places), dim=1)


_host_weights = functools.lru_cache(maxsize=64)(counting_weights)


def flags_of(mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return for each row of an attention mask the number of tokens and the sum of their column numbers, as `(batch, 2)
    int64`.

    The tokens of a row are all at its start if and only if the sum of their column numbers is the smallest possible sum
    for that number of tokens. The result is on the device of the mask.
    """
    return (mask.ne(0).unsqueeze(-1) * weights).sum(1)


def content_from_flags(flags: np.ndarray, sequence: int) -> MaskContent:
    """Return the padding and the number of tokens of an attention mask, from the result of `flags_of` for this mask."""
    counts, places = flags[:, 0], flags[:, 1]
    tokens = int(counts.sum())
    if tokens == flags.shape[0] * sequence:
        return MaskContent("full", tokens)
    if counts.min() >= 1 and (places * 2 == counts * (counts - 1)).all():
        return MaskContent("lengths", tokens)
    return MaskContent("general", tokens)


def mask_content(mask: torch.Tensor) -> MaskContent:
    """Return the padding and the number of tokens of a `(batch, sequence)` attention mask. This waits for a mask in GPU
    memory.
    """
    sequence = mask.shape[1]
    # Only weights in CPU memory are cached: on a GPU, every stream that reads cached weights would have to wait for
    # them.
    weights = counting_weights(sequence, mask.device) if mask.is_cuda else _host_weights(sequence)
    return content_from_flags(flags_of(mask, weights).cpu().numpy(), sequence)


def plan_for(content: MaskContent, shape: Sequence[int], *, packs: bool, short: bool) -> MaskPlan:
    """Return the fastest way to compute a call with a certain attention mask.

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
    """Return whether the graph in a file can be computed faster without padding (packed). This requires float16,
    because ONNX Runtime has fast packed kernels only for float16.
    """
    model = read_graph(path)
    mask = made_by_name(model.graph, MASK_NAME)
    if mask is None or mask_input(path) is None or not can_pack(model, mask):
        return False
    weights = [node.inputs[1] for node in model.graph if node.op_type == "Attention"]
    return all(weight is not None and weight.dtype == ir.DataType.FLOAT16 for weight in weights)


def mask_input(path: Path) -> str | None:
    """Return the name of the graph input that fused attention reads as the attention mask.

    Return `None` if the graph has no fused attention with such an input, so that it cannot be rewritten for other kinds
    of padding. Multi-vector models are not rewritten either, because the vectors of masked tokens are used: the tokens that
    some of these models append to queries are masked.
    """
    model = read_graph(path)
    if any(str(output.name).startswith(TOKEN_VECTORS) for output in model.graph.outputs):
        return None
    mask = made_by_name(model.graph, MASK_NAME)
    source = unwrapped(mask, "Cast")
    if source is None or not source.is_graph_input():
        return None
    return str(source.name) if any(node.op_type in _MASK_INPUT for node in readers(mask)) else None


def in_form(path: Path, form: FormName) -> bytes:
    """Return the graph in a file, rewritten for a certain kind of padding (`FormName`), as a serialized model. The
    weights stay in their files.
    """
    model = read_graph(path)
    mask = made_by_name(model.graph, MASK_NAME)
    if form != "general" and mask is not None:
        for rows in readers(made_by_name(model.graph, ROWS_NAME)):
            if rows.op_type == "Where" and rows.inputs[1] is not None:
                replace_value(rows.outputs[0], rows.inputs[1])
        if form == "packed":
            PackingRewriter(model, mask).run()
        else:
            lengths = _lengths(model.graph, mask) if form == "lengths" else None
            for node in readers(mask):
                position = _MASK_INPUT.get(node.op_type)
                if node.domain == MICROSOFT and position is not None and node.inputs[position] is mask:
                    node.replace_input_with(position, lengths)
        passes.RemoveUnusedNodesPass()(model)
    return serialized(model)


def _lengths(graph: ir.Graph, mask: ir.Value) -> ir.Value:
    """Add nodes to the graph that compute the number of tokens in each row, and return the result: `(batch,) int32`."""
    new = NewNodes(graph, "accel.lengths")
    assert mask.shape is not None
    total = new.op("ReduceSum", mask, new.constant([1]), keepdims=0, like=mask, shape=[mask.shape[0]])
    insert_after(mask, graph, new.nodes)
    return total
