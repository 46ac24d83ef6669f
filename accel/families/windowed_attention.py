"""Longformer's and LED's attention in a trace: windowed attention, and some tokens with global attention.

transformers creates overlapping windows with strided views, and branches on whether a mask contains global tokens. During a
trace, the layers compute the same from blocks of tokens, for any global tokens in the mask.
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
    """Compute a layer's output `(batch, length, hidden)`, for any length.

    Args:
        self: The attention layer.
        hidden_states: `(batch, length, hidden)`.
        attention_mask: `(batch, length)`: negative for padding, 0 for windowed attention, positive for global attention.
        is_index_masked, is_index_global_attn: `(batch, length) bool`: True for padding, and for global attention.
        is_global_attn: Whether there are tokens with global attention. Ignored, because its value is unknown in a trace.
        output_attentions: Whether to return the attention probabilities, which is not supported.

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
    """Return the indices of columns in which any row has a global token, and each column's index in this list.

    The first column is always included, because some runtimes fail on an empty list.
    """
    first = torch.arange(is_global.shape[1], device=is_global.device) == 0
    anywhere = is_global.any(dim=0) | first
    return anywhere.nonzero()[:, 0], anywhere.to(torch.int64).cumsum(0) - 1


def _near(
    layer: Any, hidden: torch.Tensor, mask: torch.Tensor, is_global: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Compute windowed attention, which also includes the global tokens."""
    size, length = layer.one_sided_attn_window_size, hidden.shape[1]
    query, key, value = _heads(layer, _query(layer, layer.query, hidden), layer.key(hidden), layer.value(hidden))
    offsets = torch.arange(3 * size, device=mask.device) - size - torch.arange(size, device=mask.device)[:, None]
    seen = (offsets.abs() <= size) & (_around(mask[:, None, :, None], size, padding=-1.0) == 0).transpose(3, 4)
    least = torch.finfo(query.dtype).min
    near = (_blocks(query, size) @ _around(key, size).transpose(3, 4)).masked_fill(~seen, least)
    far = query @ key.index_select(2, chosen).transpose(2, 3)
    far = far.masked_fill(~is_global.index_select(1, chosen)[:, None, None], least)
    probabilities = _softmax(torch.cat([near, _blocks(far, size)], dim=-1))
    found = (probabilities[..., : 3 * size] @ _around(value, size)).flatten(2, 3)
    found = found + probabilities[..., 3 * size :].flatten(2, 3) @ value.index_select(2, chosen)
    return found[:, :, :length].transpose(1, 2).flatten(2)


def _far(layer: Any, hidden: torch.Tensor, is_masked: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Compute attention of the global tokens to all tokens, `(batch, chosen, hidden)`, with separate projections."""
    query = _query(layer, layer.query_global, hidden.index_select(1, chosen))
    query, key, value = _heads(layer, query, layer.key_global(hidden), layer.value_global(hidden))
    scores = (query @ key.transpose(2, 3)).masked_fill(is_masked[:, None, None], torch.finfo(query.dtype).min)
    return (_softmax(scores) @ value).transpose(1, 2).flatten(2)


def _query(layer: Any, project: Any, hidden: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = project(hidden) / math.sqrt(layer.head_dim)
    return found


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
    """Return each block with the block before and the block after it: `(batch, heads, blocks, 3 * size, n)`."""
    blocks = _blocks(tensor, size, before=size, after=size, padding=padding)
    return torch.cat([blocks[:, :, :-2], blocks[:, :, 1:-1], blocks[:, :, 2:]], dim=3)


def _unpadded(_model: Any, *, pad_token_id: int, **inputs: Any) -> tuple[Any, ...]:  # noqa: ARG001
    """Return a padding length of 0 and the unchanged inputs."""
    return 0, *inputs.values()


def replacements(attention: type, encoder: type) -> list[Replacement]:
    """Return replacements for the class of the attention layers and the class that pads to whole windows."""
    # transformers calls `.item()` to ask whether there are global tokens. `_attend` ignores the answer.
    item = torch.Tensor.item

    def answer(tensor: torch.Tensor) -> Any:
        return False if tensor.dtype == torch.bool else item(tensor)

    return [
        (attention, "forward", _attend), (encoder, "_pad_to_window_size", _unpadded), (torch.Tensor, "item", answer)
    ]  # fmt: skip
