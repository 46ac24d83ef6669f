"""Encoders without their padding: layers see the tokens of all rows one behind another, attention knows where each row ends.

Embeddings and heads compute rows as ever. Between them only the real tokens are computed, and as many others as fill up to a number
that code is compiled for: those are masked ones, rows by themselves, which nobody reads. Batches without any padding are computed
as they stand, without a mask, which the fastest kernels of attention do not take. All others, such as those of few tokens, are
computed with their padding, by a kernel of attention that reads the mask itself.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from accel.capture import CACHE_NAMES

from .precision import HALF
from .sizes import MASK, Sizes

Tokens = int | Literal["all"] | None
"""How many tokens layers compute: a number of them, all of a batch without padding, or padding and all."""
Asked = Callable[[bool], Tokens]
"""Waits until it is known; given whether the call's work has begun already."""

# Attention's names, as transformers' settings have them; the first with the number of tokens behind it.
_VARLEN, _WHOLE, _MASKED = "accel_varlen", "accel_whole", "accel_masked"
# Below so many tokens a call is bound by launches.
_FEWEST = 2048
# Sizes that are compiled for, of a padded one.
_PARTS = 16
# Longest rows without padding for which our own attention is faster: on an H200, 32x128 takes it 10 microseconds and cuDNN 11, 64x32 5
# and 18, 16x256 16 and 14.
_SHORT = 128
# On an H100, 16x384 in 12 heads of 64: 27, 38 and 72 microseconds.
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


def asked_tokens(call: Mapping[str, Any], have: Sizes, want: Sizes) -> Asked | None:
    """Ask how many tokens the layers of a call compute, by its mask as it is now: what the GPU is given later does not delay the answer.

    Returns:
        Waits for the mask and counts. `None` where that is not worth the wait. It tells `None` where a row begins with padding:
        many heads read the first token, which is not computed then.
    """
    mask = call.get(MASK)
    if have.batch is None or have.length is None or want.batch is None or want.length is None:
        return None
    rows, length, whole = have.batch, have.length, want.batch * want.length
    # Rows that fill up a batch are the last one again.
    more = (want.batch - rows) * length
    if whole < _FEWEST or (mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2)):
        return None
    asked = None if mask is None else _asked(mask)

    def tokens(begun: bool) -> Tokens:
        real = rows * length
        if asked is not None:
            held = asked(begun)
            real = int(np.count_nonzero(held))
            if np.count_nonzero(held[:, 0]) < rows:
                return None
        real += more
        step = whole // _PARTS
        return "all" if real == whole else min(-(-real // step) * step, whole)

    return tokens


def _asked(mask: torch.Tensor) -> Callable[[bool], np.ndarray]:
    """Gets the mask, as it is now, on the host: one copy takes less than kernels that count, and a copy of what they counted."""
    there = _reached(mask.device) if mask.is_cuda else None

    def found(begun: bool) -> np.ndarray:
        if there is None:
            held = mask.detach()
        else:
            side = _side_stream(mask.device) if begun else None
            with torch.cuda.stream(side):
                if side is not None:
                    side.wait_event(there)
                held = mask.detach().to("cpu", non_blocking=True)
                arrived = _reached(mask.device)
            arrived.synchronize()
        # NumPy has no bfloat16.
        values: np.ndarray = (held.float() if held.dtype == torch.bfloat16 else held).numpy()
        return values

    return found


def _reached(device: torch.device) -> torch.Event:
    """This place of the current stream."""
    # Of this kind: it does not ask for the stream as PyTorch has it, which takes 7 microseconds.
    event = torch.Event(device=device)
    event.record()
    return event


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def packable(model: Any, dtype: torch.dtype) -> bool:
    """Whether a model is an encoder whose layers can be packed: absolute positions, and attention by transformers' interface."""
    layers = _layers(model)
    config = getattr(model, "config", None)
    if layers is None or config is None or dtype not in HALF or _varlen() is None:
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


class Rows(NamedTuple):
    """What packed layers are given instead of a mask.

    Attributes:
        places: Where each token of all rows stands, `(rows, length) int64`.
        order: Which token stands at each of the places that are computed, `(tokens,) int64`.
        bounds: Where each row begins, and the last one ends, `(... ,) int32`.
    """

    places: torch.Tensor
    order: torch.Tensor
    bounds: torch.Tensor


def attending(model: Any, tokens: Tokens) -> Callable[..., Any]:
    """What computes calls of a packable model of which layers compute so much; to be compiled. Of tokens that are not computed,
    layers return zeros.
    """
    made = sharing_copy(model)
    if tokens is None:
        _set_attention(made, _MASKED, _attend_masked, lambda *_, attention_mask=None, **__: attention_mask)
    elif tokens == "all":
        _set_attention(made, _WHOLE, _attend_whole, lambda *_, **__: None)
    else:
        _pack(made, tokens)
    forward: Callable[..., Any] = made.forward
    return forward


def _pack(made: Any, tokens: int) -> None:
    """Have a model's layers compute so many tokens, one behind another."""
    layers = _layers(made)
    assert layers is not None, "it is packable"
    _set_attention(made, f"{_VARLEN}_{tokens}", _attend, functools.partial(_rows, tokens=tokens))
    first = layers[0].forward

    def entering(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        order = _given(args, kwargs).order
        return first(hidden_states.flatten(0, 1).index_select(0, order)[None], *args, **kwargs)

    last = entering if len(layers) == 1 else layers[-1].forward

    def leaving(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        places = _given(args, kwargs).places
        found = last(hidden_states, *args, **kwargs)
        packed = found[0] if isinstance(found, tuple) else found
        # What was not computed are masked tokens, which nobody reads.
        rows = packed[0].index_select(0, places.flatten().clamp(max=tokens - 1))
        rows = rows.view(*places.shape, -1).where((places < tokens)[..., None], 0)
        return (rows, *found[1:]) if isinstance(found, tuple) else rows

    layers[0].forward = entering
    layers[-1].forward = leaving


def _set_attention(model: Any, name: str, attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Rows:
    rows: Rows = kwargs[MASK] if MASK in kwargs else args[0]
    return rows


def _rows(*_: Any, attention_mask: torch.Tensor, tokens: int, **__: Any) -> Rows:
    """Real tokens first, those of each row in their order, then the masked ones, as far as they are computed."""
    flat = attention_mask.flatten() != 0
    seen, others = flat.cumsum(0), (~flat).cumsum(0)
    places = torch.where(flat, seen - 1, seen[-1] + others - 1)
    order = torch.empty_like(places).scatter_(0, places, torch.arange(places.numel(), device=places.device))
    length = attention_mask.shape[1]
    ends = (attention_mask != 0).sum(1).cumsum(0)
    # Masked tokens are rows behind the others, none of them longer than those.
    more = ends[-1] + length * torch.arange(1, -(-tokens // length) + 1, device=ends.device)
    bounds = torch.cat([ends.new_zeros(1), ends, more.clamp(max=tokens)]).to(torch.int32)
    return Rows(places.view(attention_mask.shape), order[:tokens], bounds)


def _attend(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Rows,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of packed rows: `(1, heads, tokens, size)` each, of which none is longer than the padded ones."""
    varlen = _varlen()
    assert varlen is not None
    bounds, length = attention_mask.bounds, attention_mask.places.shape[1]
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    found = varlen(q, k, v, bounds, bounds, length, length, scale=scaling)
    return found[None], None


def _attend_whole(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of rows without padding: `(batch, heads, sequence, size)` each."""
    if query.shape[2] <= _SHORT:
        return _attend_masked(_module, query, key, value, None, scaling)
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True):
        found = scaled_dot_product_attention(query, key, value, scale=scaling)
    return found.transpose(1, 2), None


def _attend_masked(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of rows with their mask: `(batch, heads, sequence, size)` each, and `(batch, sequence)`."""
    # Triton comes with PyTorch's builds for GPUs alone.
    from .kernels import attention

    return attention(query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling), None
