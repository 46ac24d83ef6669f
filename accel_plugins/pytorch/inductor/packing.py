"""Encoders without padding: layers get the tokens of all rows as one sequence, and attention gets the start and end of
each row.

Embeddings and heads compute padded rows. The layers between them compute all tokens that are not padding. They also
compute some masked tokens, as separate rows that nothing reads, to reach a number of tokens that code was compiled for.
Batches without padding are computed without a mask, because the fastest attention kernels take no mask. Other batches,
such as small ones, are computed with their padding by a kernel that reads the mask.
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
from .sizes import MASK, CallSizes

Tokens = int | Literal["all"] | None
"""Number of tokens that the layers compute after the padding is removed; "all" if the batch has no padding to remove; `None` if the
layers also compute the padding."""
Asked = Callable[[bool], Tokens]
"""Function that waits for the mask and returns the number of tokens; its argument tells whether the call has already
started.
"""

# Names of the attention functions, registered with transformers. The first is followed by the number of tokens.
_VARLEN, _WHOLE, _MASKED = "accel_varlen", "accel_whole", "accel_masked"
# Batches with fewer tokens are not packed: kernel launches take most of their time.
_FEWEST = 2048
# Number of different token counts to compile for, per padded size of the batch.
_PARTS = 16
# Longest rows without padding for which the Triton kernel in kernels.py is faster than cuDNN. Measured on an H200 in
# microseconds, Triton and cuDNN: batch 32 of 128 tokens 10 and 11, 64 of 32 tokens 5 and 18, 16 of 256 tokens 16 and
# 14.
_SHORT = 128
# Measured on an H100, batch 16 of 384 tokens, 12 heads of size 64: 27, 38 and 72 microseconds for the first three.
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


def asked_tokens(call: Mapping[str, Any], have: CallSizes, want: CallSizes) -> Asked | None:
    """Return a function that counts the tokens which the layers of a call must compute, from the call's current mask.

    Work that is started on the GPU later does not delay the count.

    Returns:
        A function that waits for the mask and returns the count, or `None` if a row starts with padding: many heads
        read the first token, which would not be computed. The result is `None` instead of a function if counting is not
        worth the wait.
    """
    mask = call.get(MASK)
    if have.batch is None or have.length is None or want.batch is None or want.length is None:
        return None
    rows, length, whole = have.batch, have.length, want.batch * want.length
    # The batch is padded with copies of its last row.
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
    """Return a function that copies the current mask to the CPU. This copy is faster than to count on the GPU and copy
    the result.
    """
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
        # NumPy has no bfloat16, so such a mask is converted to float32.
        values: np.ndarray = (held.float() if held.dtype == torch.bfloat16 else held).numpy()
        return values

    return found


def _reached(device: torch.device) -> torch.Event:
    """Record an event at the current position of the current stream."""
    # Not `torch.cuda.Event`: it takes 7 microseconds to look up the stream.
    event = torch.Event(device=device)
    event.record()
    return event


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def packable(model: Any, dtype: torch.dtype) -> bool:
    """Whether the layers of a model can be packed.

    The model must be an encoder with absolute position embeddings and with the attention interface of transformers.
    """
    layers = _layers(model)
    config = getattr(model, "config", None)
    if layers is None or config is None or dtype not in HALF or _varlen() is None:
        return False
    if getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
        return False
    takes = inspect.signature(layers[0].forward).parameters
    # Layers with other arguments cannot be packed: these arguments (rotary or relative positions) have the shape of the
    # padded rows.
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
    """Return the layers of a model, or `None` if it does not have exactly one stack of layers."""
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
    """Copy a model's modules and settings; the copy uses the same weight tensors."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


class PackedRows(NamedTuple):
    """Argument that packed layers get in place of an attention mask.

    Attributes:
        places: Index of each token in the packed sequence, `(rows, length) int64`.
        order: Index of the token at each position of the packed sequence, `(tokens,) int64`.
        bounds: Start of each row, and the end of the last row, in the packed sequence, `(rows + 1 or more,) int32`.
    """

    places: torch.Tensor
    order: torch.Tensor
    bounds: torch.Tensor


def attending(model: Any, tokens: Tokens) -> Callable[..., Any]:
    """Return the `forward` of a copy of the model whose layers compute only the given tokens, ready to be compiled.
    Layers return zeros for other tokens.
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
    """Change the layers of a model so that they compute this number of tokens as one sequence."""
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
        # Tokens that were not computed are masked, and nothing reads them.
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


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PackedRows:
    rows: PackedRows = kwargs[MASK] if MASK in kwargs else args[0]
    return rows


def _rows(*_: Any, attention_mask: torch.Tensor, tokens: int, **__: Any) -> PackedRows:
    """Return the packing order: tokens that are not padding first, row by row, then masked tokens that are computed as
    filling.
    """
    flat = attention_mask.flatten() != 0
    seen, others = flat.cumsum(0), (~flat).cumsum(0)
    places = torch.where(flat, seen - 1, seen[-1] + others - 1)
    order = torch.empty_like(places).scatter_(0, places, torch.arange(places.numel(), device=places.device))
    length = attention_mask.shape[1]
    ends = (attention_mask != 0).sum(1).cumsum(0)
    # Masked tokens that are computed form additional rows of at most `length` tokens.
    more = ends[-1] + length * torch.arange(1, -(-tokens // length) + 1, device=ends.device)
    bounds = torch.cat([ends.new_zeros(1), ends, more.clamp(max=tokens)]).to(torch.int32)
    return PackedRows(places.view(attention_mask.shape), order[:tokens], bounds)


def _attend(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PackedRows,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for packed rows; each input is `(1, heads, tokens, size)`."""
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
    """Attention function for rows without padding; each input is `(batch, heads, sequence, size)`."""
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
    """Attention function for padded rows: inputs `(batch, heads, sequence, size)`, mask `(batch, sequence)`."""
    # Triton is installed only with PyTorch's builds for GPUs.
    from .kernels import attention

    return attention(query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling), None
