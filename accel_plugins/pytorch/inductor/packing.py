"""Packed encoders: the layers compute no padding. They get the tokens of all rows as one sequence, and the attention
function gets the start and the end of each row.

The embeddings and the head of the model compute padded rows. The encoder layers compute all tokens that are not
padding. Code is compiled for certain numbers of tokens only; to reach such a number, the layers also compute some
masked tokens, as additional rows whose results are discarded. Batches without padding are computed without a mask,
because the fastest attention kernels support no mask. Small batches, and rows that start with padding, are computed
with their padding, by a kernel that reads the mask.
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
"""Number of tokens that the layers compute after the padding is removed.

The value is "all" if the batch contains no padding, and `None` if the layers also compute the padding.
"""
TokenCounter = Callable[[bool], Tokens]
"""Function that waits for the attention mask and returns the number of tokens that the layers compute.

Its argument is `True` if the call was already launched on the GPU.
"""

# Names under which the attention functions are registered with transformers. The number of tokens is appended to the
# first name.
_VARLEN, _WHOLE, _MASKED = "accel_varlen", "accel_whole", "accel_masked"
# Batches with fewer tokens, padding included, are not packed, because kernel launches take most of the time of small
# batches.
_FEWEST = 2048
# Maximum number of different token counts to compile for, for each padded size of the batch.
_PARTS = 16
# Largest number of tokens per row, without padding, for which the Triton kernel in kernels.py is faster than cuDNN.
# Measured on an H200 with Triton and with cuDNN: 5 and 18 microseconds for 64 rows of 32 tokens, 10 and 11 microseconds
# for 32 rows of 128 tokens, 16 and 14 microseconds for 16 rows of 256 tokens.
_SHORT = 128
# Attention kernels of PyTorch, the fastest first. The first three take 27, 38 and 72 microseconds for 16 rows of 384
# tokens with 12 heads of size 64, measured on an H100.
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


def token_counter(call: Mapping[str, Any], have: CallSizes, want: CallSizes) -> TokenCounter | None:
    """Return a function that counts the tokens which the layers must compute for a call.

    The function reads the attention mask as it is now. Work that the caller launches on the GPU later does not delay
    the function.

    Returns:
        A function that waits for the mask and returns the number of tokens. The function returns `None` if a row starts
        with padding: many model heads read the first token of a row, and packed layers do not compute padding. If the
        batch is too small, or its inputs cannot be packed, the result is `None` instead of a function.
    """
    mask = call.get(MASK)
    if have.batch is None or have.length is None or want.batch is None or want.length is None:
        return None
    rows, length, padded_tokens = have.batch, have.length, want.batch * want.length
    # The batch is padded with copies of its last row, so the tokens of these copies are counted as well.
    more = (want.batch - rows) * length
    if padded_tokens < _FEWEST or (mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2)):
        return None
    read_mask = None if mask is None else _mask_reader(mask)

    def tokens(begun: bool) -> Tokens:
        real = rows * length
        if read_mask is not None:
            current_mask = read_mask(begun)
            real = int(np.count_nonzero(current_mask))
            if np.count_nonzero(current_mask[:, 0]) < rows:
                return None
        real += more
        step = padded_tokens // _PARTS
        return "all" if real == padded_tokens else min(-(-real // step) * step, padded_tokens)

    return tokens


def _mask_reader(mask: torch.Tensor) -> Callable[[bool], np.ndarray]:
    """Return a function that copies the current mask to the CPU. Copying the mask is faster than counting its tokens on
    the GPU and copying the result.
    """
    mask_ready = _reached(mask.device) if mask.is_cuda else None

    def copied_mask(begun: bool) -> np.ndarray:
        if mask_ready is None:
            values = mask.detach()
        else:
            side = _side_stream(mask.device) if begun else None
            with torch.cuda.stream(side):
                if side is not None:
                    side.wait_event(mask_ready)
                values = mask.detach().to("cpu", non_blocking=True)
                arrived = _reached(mask.device)
            arrived.synchronize()
        # NumPy has no bfloat16, so such a mask is converted to float32.
        array: np.ndarray = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        return array

    return copied_mask


def _reached(device: torch.device) -> torch.Event:
    """Record a CUDA event on the current stream and return the event."""
    # `torch.cuda.Event` would take 7 microseconds longer, because it creates a stream object.
    event = torch.Event(device=device)
    event.record()
    return event


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def packable(model: Any, dtype: torch.dtype) -> bool:
    """Return whether the layers of a model can compute packed tokens (see `PackedRows`).

    The model must be an encoder with absolute position embeddings and with the attention interface of transformers.
    """
    layers = _layers(model)
    config = getattr(model, "config", None)
    if layers is None or config is None or dtype not in HALF or _varlen() is None:
        return False
    if getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
        return False
    parameters = inspect.signature(layers[0].forward).parameters
    # Layers with other parameters cannot be packed, because these parameters (rotary or relative positions) have the
    # shape of the padded rows.
    supported = {
        "hidden_states",
        "attention_mask",
        "kwargs",
        "encoder_hidden_states",
        "encoder_attention_mask",
        *CACHE_NAMES,
    }
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and set(parameters) <= supported
        and MASK in parameters
    )


def _layers(model: Any) -> torch.nn.ModuleList | None:
    """Return the layers of a model, or `None` if it does not have exactly one stack of layers."""
    stacks = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len({type(m) for m in module}) == 1
    ]
    return stacks[0] if len(stacks) == 1 else None


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
    """Positions of the tokens of a batch in a packed sequence. Packed layers get this object instead of an attention
    mask.

    Attributes:
        places: Index of each token of the padded batch in the packed sequence, `(rows, length) int64`.
        order: Index in the flattened batch of each token of the packed sequence, `(tokens,) int64`.
        bounds: Start of each row, and the end of the last row, in the packed sequence, `(rows + 1 or more,) int32`.
    """

    places: torch.Tensor
    order: torch.Tensor
    bounds: torch.Tensor


def attending(model: Any, tokens: Tokens) -> Callable[..., Any]:
    """Return the `forward` of a copy of the model whose layers compute only `tokens` tokens. The last layer returns
    zeros for tokens that were not computed. The function can be compiled.
    """
    packed_model = sharing_copy(model)
    if tokens is None:
        _set_attention(packed_model, _MASKED, _attend_masked, lambda *_, attention_mask=None, **__: attention_mask)
    elif tokens == "all":
        _set_attention(packed_model, _WHOLE, _attend_whole, lambda *_, **__: None)
    else:
        _pack(packed_model, tokens)
    forward: Callable[..., Any] = packed_model.forward
    return forward


def _pack(packed_model: Any, tokens: int) -> None:
    """Change the layers of a model so that they compute this number of tokens as one sequence."""
    layers = _layers(packed_model)
    assert layers is not None, "callers check `packable` first"
    _set_attention(packed_model, f"{_VARLEN}_{tokens}", _attend, functools.partial(_rows, tokens=tokens))
    first = layers[0].forward

    def entering(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        order = _packed_rows(args, kwargs).order
        return first(hidden_states.flatten(0, 1).index_select(0, order)[None], *args, **kwargs)

    last = entering if len(layers) == 1 else layers[-1].forward

    def leaving(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        places = _packed_rows(args, kwargs).places
        output = last(hidden_states, *args, **kwargs)
        packed = output[0] if isinstance(output, tuple) else output
        # Tokens that were not computed are masked. Their outputs are set to zero, and no later code reads them.
        rows = packed[0].index_select(0, places.flatten().clamp(max=tokens - 1))
        rows = rows.view(*places.shape, -1).where((places < tokens)[..., None], 0)
        return (rows, *output[1:]) if isinstance(output, tuple) else rows

    layers[0].forward = entering
    layers[-1].forward = leaving


def _set_attention(model: Any, name: str, attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name


def _packed_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PackedRows:
    rows: PackedRows = kwargs[MASK] if MASK in kwargs else args[0]
    return rows


def _rows(*_: Any, attention_mask: torch.Tensor, tokens: int, **__: Any) -> PackedRows:
    """Return the packing order. Tokens that are not padding come first, row by row. Masked tokens follow, to reach the
    number of tokens that the code was compiled for.
    """
    flat = attention_mask.flatten() != 0
    counted, others = flat.cumsum(0), (~flat).cumsum(0)
    places = torch.where(flat, counted - 1, counted[-1] + others - 1)
    order = torch.empty_like(places).scatter_(0, places, torch.arange(places.numel(), device=places.device))
    length = attention_mask.shape[1]
    ends = (attention_mask != 0).sum(1).cumsum(0)
    # The masked tokens in the packed sequence form additional rows of at most `length` tokens.
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
    """Compute attention for packed rows; query, key and value are `(1, heads, tokens, size)`."""
    varlen = _varlen()
    assert varlen is not None
    bounds, length = attention_mask.bounds, attention_mask.places.shape[1]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = varlen(q, k, v, bounds, bounds, length, length, scale=scaling)
    return output[None], None


def _attend_whole(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for rows without padding; query, key and value are `(batch, heads, sequence, size)`."""
    if query.shape[2] <= _SHORT:
        return _attend_masked(_module, query, key, value, None, scaling)
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True):
        output = scaled_dot_product_attention(query, key, value, scale=scaling)
    return output.transpose(1, 2), None


def _attend_masked(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for padded rows; query, key and value are `(batch, heads, sequence, size)`, the mask is
    `(batch, sequence)`.
    """
    # Triton is installed only with PyTorch's builds for GPUs.
    from .kernels import attention

    return attention(query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling), None
