"""Encoders without their padding: layers see the tokens of all rows one behind another, attention knows where each row ends.

Embeddings and heads compute rows as ever. Between them only the real tokens are computed, and as many others as fill up to a number
that code is compiled for: those are masked ones, rows by themselves, which nobody reads.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from accel.capture import CACHE_NAMES

from .sizes import MASK, Sizes

ATTENTION = "accel_varlen"
"""The attention of packed layers, by transformers' word for it."""

# Below so many tokens a call is bound by launches; above this share of real ones there is little to leave out.
_FEWEST, _FULL = 2048, 0.9
# Sizes that are compiled for, of a padded one.
_PARTS = 8
_DTYPES = (torch.float16, torch.bfloat16)


def packed_tokens(call: Mapping[str, Any], have: Sizes, want: Sizes) -> int | None:
    """How many tokens the layers of a call compute when it is packed; `None` where it is not worth it. Waits for the mask."""
    mask = call.get(MASK)
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or want.batch is None or want.length is None:
        return None
    whole = want.batch * want.length
    if whole < _FEWEST or have.batch is None:
        return None
    # Rows that fill up a batch are the last one again.
    real = int(mask.sum()) + (want.batch - have.batch) * int(mask.shape[1])
    if real > _FULL * whole:
        return None
    step = whole // _PARTS
    return min(-(-real // step) * step, whole)


def packable(model: Any, dtype: torch.dtype) -> bool:
    """Whether a model is an encoder whose layers can be packed: absolute positions, and attention by transformers' interface."""
    layers = _layers(model)
    config = getattr(model, "config", None)
    if layers is None or config is None or dtype not in _DTYPES or _varlen() is None:
        return False
    if getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
        return False
    takes = inspect.signature(layers[0].forward).parameters
    # What else a layer is given has the shape of rows: rotary or relative positions.
    known = {
        "hidden_states",
        "attention_mask",
        "kwargs",
        "encoder_hidden_states",
        "encoder_attention_mask",
        *CACHE_NAMES,
    }
    return bool(getattr(model, "_supports_attention_backend", False)) and set(takes) <= known and MASK in takes


def _layers(model: Any) -> torch.nn.ModuleList | None:
    """The layers of a model with one stack of them."""
    found = [
        one for one in model.modules() if isinstance(one, torch.nn.ModuleList) and len({type(m) for m in one}) == 1
    ]
    return found[0] if len(found) == 1 else None


def _varlen() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def sharing_copy(model: Any) -> Any:
    """A copy of a model's modules and settings over the same weights."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def packed(model: Any, tokens: int) -> Callable[..., Any]:
    """What computes calls of a packable model with so many tokens in its layers; to be compiled."""
    made = sharing_copy(model)
    layers = _layers(made)
    assert layers is not None, "it is packable"
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, _padding)
    for module in made.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = ATTENTION
    first = layers[0].forward

    def entering(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        places = _places(_mask_of(args, kwargs))
        order = torch.empty_like(places).scatter_(0, places, torch.arange(places.numel(), device=places.device))
        return first(hidden_states.flatten(0, 1).index_select(0, order[:tokens])[None], *args, **kwargs)

    last = entering if len(layers) == 1 else layers[-1].forward

    def leaving(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = _mask_of(args, kwargs)
        found = last(hidden_states, *args, **kwargs)
        packed = found[0] if isinstance(found, tuple) else found
        places = _places(mask)
        # What was not computed are masked tokens, which nobody reads.
        rows = packed[0].index_select(0, places.clamp(max=tokens - 1)).where((places < tokens)[:, None], 0)
        rows = rows.view(*mask.shape, -1)
        return (rows, *found[1:]) if isinstance(found, tuple) else rows

    layers[0].forward = entering
    layers[-1].forward = leaving
    forward: Callable[..., Any] = made.forward
    return forward


def _mask_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    mask: torch.Tensor = kwargs[MASK] if MASK in kwargs else args[0]
    return mask


def _places(mask: torch.Tensor) -> torch.Tensor:
    """Where each token of all rows stands when the real ones come first, each group in its order: `(rows * length,) int64`."""
    real = mask.flatten() != 0
    seen, others = real.cumsum(0), (~real).cumsum(0)
    return torch.where(real, seen - 1, seen[-1] + others - 1)


def _padding(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    """The mask of padding itself, `(batch, sequence)`: what layers are given instead of a mask of pairs."""
    return attention_mask


def _attend(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of packed rows: `(1, heads, tokens, size)` each, and the mask of padding."""
    tokens, length = query.shape[2], attention_mask.shape[1]
    ends = (attention_mask != 0).sum(1).cumsum(0)
    # Masked tokens are rows behind the others, none of them longer than those.
    more = ends[-1] + length * torch.arange(1, -(-tokens // length) + 1, device=ends.device)
    bounds = torch.cat([ends.new_zeros(1), ends, more.clamp(max=tokens)]).to(torch.int32)
    varlen = _varlen()
    assert varlen is not None
    q, k, v = (one[0].transpose(0, 1).contiguous() for one in (query, key, value))
    found = varlen(q, k, v, bounds, bounds, length, length, scale=scaling)
    return found[None], None
