"""Sliding-window attention of Longformer and LED that can be traced, with global attention for some tokens.

transformers creates overlapping windows with strided views, and branches on the presence of tokens with global attention. A trace
cannot follow this code. During a trace, the functions of this module compute the same attention from blocks of tokens, for any
number of tokens with global attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from ..errors import ExportError
from ..interfaces.family import Replacement


def _attend(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    is_index_masked: torch.Tensor,
    is_index_global_attn: torch.Tensor,
    is_global_attn: bool | None = None,  # noqa: ARG001
    output_attentions: bool = False,
) -> tuple[torch.Tensor]:
    """Compute the output `(batch, length, hidden)` of an attention layer, for any length.

    Args:
        self: The attention layer.
        hidden_states: Hidden states `(batch, length, hidden)`.
        attention_mask: Mask `(batch, length)` with a negative value for padding, 0 for sliding-window attention, and a positive value
            for global attention.
        is_index_masked: `(batch, length) bool`, True for padding.
        is_index_global_attn: `(batch, length) bool`, True for tokens with global attention.
        is_global_attn: Whether there are tokens with global attention. This argument is ignored, because a trace does not know the
            value.
        output_attentions: Whether to return the attention probabilities. True is not supported.

    Raises:
        ExportError: `output_attentions` is True.
    """
    if output_attentions:
        raise ExportError(
            "The attentions of Longformer and LED cannot be exported, because their shape depends on the number of tokens with global "
            "attention.",
            fix="export the model without output_attentions, or run the model with backend='pytorch'.",
        )
    chosen, place = _chosen(is_index_global_attn)
    masked, is_global = is_index_masked[:, :, None], is_index_global_attn[:, :, None]
    near = _near(self, hidden_states, attention_mask, is_index_global_attn, chosen)
    far = _far(self, hidden_states, is_index_masked, chosen).index_select(1, place)
    return (torch.where(is_global, far, near.masked_fill(masked, 0.0)),)


def _chosen(is_global: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of columns in which any row has a token with global attention, and each column's place in this list.

    The first column is always in the list, because some runtimes fail on an empty list.
    """
    first = torch.arange(is_global.shape[1], device=is_global.device) == 0
    anywhere = is_global.any(dim=0) | first
    return anywhere.nonzero()[:, 0], anywhere.to(torch.int64).cumsum(0) - 1


def _near(
    layer: Any, hidden: torch.Tensor, mask: torch.Tensor, is_global: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Compute the attention of each token to its window and to all tokens with global attention."""
    size, length = layer.one_sided_attn_window_size, hidden.shape[1]
    query, key, value = _heads(layer, _query(layer, layer.query, hidden), layer.key(hidden), layer.value(hidden))
    offsets = torch.arange(3 * size, device=mask.device) - size - torch.arange(size, device=mask.device)[:, None]
    visible = (offsets.abs() <= size) & (_around(mask[:, None, :, None], size, padding=-1.0) == 0).transpose(3, 4)
    least = torch.finfo(query.dtype).min
    near = (_blocks(query, size) @ _around(key, size).transpose(3, 4)).masked_fill(~visible, least)
    far = query @ key.index_select(2, chosen).transpose(2, 3)
    far = far.masked_fill(~is_global.index_select(1, chosen)[:, None, None], least)
    probabilities = _softmax(torch.cat([near, _blocks(far, size)], dim=-1))
    attended = (probabilities[..., : 3 * size] @ _around(value, size)).flatten(2, 3)
    attended = attended + probabilities[..., 3 * size :].flatten(2, 3) @ value.index_select(2, chosen)
    return attended[:, :, :length].transpose(1, 2).flatten(2)


def _far(layer: Any, hidden: torch.Tensor, is_masked: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Compute the attention of the tokens with global attention to all tokens, `(batch, chosen, hidden)`.

    Global attention has its own query, key and value projections.
    """
    query = _query(layer, layer.query_global, hidden.index_select(1, chosen))
    query, key, value = _heads(layer, query, layer.key_global(hidden), layer.value_global(hidden))
    scores = (query @ key.transpose(2, 3)).masked_fill(is_masked[:, None, None], torch.finfo(query.dtype).min)
    return (_softmax(scores) @ value).transpose(1, 2).flatten(2)


def _query(layer: Any, project: Any, hidden: torch.Tensor) -> torch.Tensor:
    query: torch.Tensor = project(hidden) / math.sqrt(layer.head_dim)
    return query


def _heads(layer: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Split tensors into heads: `(batch, heads, tokens, head_size)`."""
    return [torch.unflatten(tensor, 2, (layer.num_heads, layer.head_dim)).transpose(1, 2) for tensor in tensors]


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


def _blocks(tensor: torch.Tensor, size: int, *, before: int = 0, after: int = 0, padding: float = 0.0) -> torch.Tensor:
    """Split `(batch, heads, length, n)` into blocks: `(batch, heads, blocks, size, n)`. The last block may be padded.

    Args:
        tensor: Tensor to split.
        size: Tokens in a block.
        before, after: Tokens of padding before and after the tensor.
        padding: Value of the padding.
    """
    length = tensor.shape[2]
    filled = size * ((length + size - 1) // size)
    padded = functional.pad(tensor, (0, 0, before, filled - length + after), value=padding)
    return torch.unflatten(padded, 2, (-1, size))


def _around(tensor: torch.Tensor, size: int, padding: float = 0.0) -> torch.Tensor:
    """Return each block joined with the block before and the block after it, as `(batch, heads, blocks, 3 * size, n)`."""
    blocks = _blocks(tensor, size, before=size, after=size, padding=padding)
    return torch.cat([blocks[:, :, :-2], blocks[:, :, 1:-1], blocks[:, :, 2:]], dim=3)


def _unpadded(_model: Any, *, pad_token_id: int, **inputs: Any) -> tuple[Any, ...]:  # noqa: ARG001
    """Return the padding length 0 and the unchanged inputs, because the traced attention needs no padding to whole windows."""
    return 0, *inputs.values()


def replacements(attention: type, encoder: type) -> list[Replacement]:
    """Return the replacements for a trace of Longformer or LED.

    Args:
        attention: Class of the attention layers.
        encoder: Class with the method `_pad_to_window_size`.
    """
    # transformers calls `.item()` on a boolean tensor to find out if any token has global attention. `_attend` ignores this value.
    item = torch.Tensor.item

    def answer(tensor: torch.Tensor) -> Any:
        return False if tensor.dtype == torch.bool else item(tensor)

    return [
        (attention, "forward", _attend), (encoder, "_pad_to_window_size", _unpadded), (torch.Tensor, "item", answer)
    ]  # fmt: skip
