"""Recurrent layers in a trace: one operator for what state-space models and linear attention do token after token.

transformers writes these recurrences as Python loops over tokens or chunks, which a trace would unroll for the length of its
sample, and most of them begin with an empty state when they read several tokens. While a model is traced, its functions of
these names are the ones here. They hand what they compute from to `accel::recurrence`, which a backend lowers to a loop of its
own, from any state over any number of tokens.
"""

# ruff: noqa: N803, N806 (A, B, C and D are the papers' words, and names that transformers calls arguments by)
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional

RECURRENCE_DOMAIN = "accel"
RECURRENCE, DELTA_RECURRENCE = "recurrence", "delta_recurrence"
_symbolic: ContextVar[bool] = ContextVar("accel_symbolic_recurrence", default=False)
_state: ContextVar[torch.Tensor | None] = ContextVar("accel_recurrent_state", default=None)
_heads_read: ContextVar[int] = ContextVar("accel_heads_read", default=0)


def _scan(
    decay: torch.Tensor,
    rate: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> torch.Tensor:
    """The results `(batch, tokens, heads, 1, values)`, and behind them along the tokens the state, a row for each key: one
    tensor, because OpenVINO's converter gives an operator of ours one result.
    """
    found = []
    for t in range(key.shape[1]):
        state = state * torch.exp(decay[:, t] * rate)
        new = value[:, t]
        if beta is not None:
            new = (new - (state * key[:, t]).sum(2, keepdim=True)) * beta[:, t]
        state = state + key[:, t] * new
        found.append(query[:, t] @ state)
    return torch.cat([torch.stack(found, dim=1), state.transpose(1, 2).unsqueeze(3)], dim=1)


@torch.library.custom_op(f"{RECURRENCE_DOMAIN}::{RECURRENCE}", mutates_args=())
def _recurrence(
    decay: torch.Tensor,
    rate: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    return _scan(decay, rate, key, value, query, None, state)


@torch.library.custom_op(f"{RECURRENCE_DOMAIN}::{DELTA_RECURRENCE}", mutates_args=())
def _delta_recurrence(
    decay: torch.Tensor,
    rate: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    return _scan(decay, rate, key, value, query, beta, state)


@_recurrence.register_fake
def _(_decay: Any, _rate: Any, _key: Any, value: torch.Tensor, _query: Any, state: torch.Tensor) -> torch.Tensor:
    return _packed_like(value, state)


@_delta_recurrence.register_fake
def _(
    _decay: Any, _rate: Any, _key: Any, value: torch.Tensor, _query: Any, _beta: Any, state: torch.Tensor
) -> torch.Tensor:
    return _packed_like(value, state)


def _packed_like(value: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    batch, new, heads, _, values = value.shape
    return value.new_empty((batch, new + state.shape[2], heads, 1, values))


def recur(
    decay: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query: torch.Tensor,
    *,
    rate: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write each token into a decaying state, and read it: for every token, `state = state * exp(decay * rate) + key^T value`
    and `result = query state`.

    Args:
        decay: `(batch, tokens, heads, keys or 1, values or 1)`.
        key, query: `(batch, tokens, heads, keys)`.
        value: `(batch, tokens, heads, values)`.
        rate: Broadcasts to `(heads, keys, values)`; 1 without it.
        beta: `(batch, tokens, heads)`: the delta rule. What the decayed state already answers to the key is taken from the
            value, and the rest written with this weight.
        state: `(batch, heads, keys, values)`; zeros without it.

    Returns:
        The results `(batch, tokens, heads, values)` and the state after them, in float32.
    """
    decay, key, value, query = (tensor.float() for tensor in (decay, key, value, query))
    batch, _, heads, values = value.shape
    rate = torch.ones(1) if rate is None else rate.float()
    if state is None:
        state = key.new_zeros((batch, heads, key.shape[3], values))
    inputs = [decay, rate, key.unsqueeze(4), value.unsqueeze(3), query.unsqueeze(3)]
    if beta is not None:
        inputs.append(beta.float()[..., None, None])
    inputs.append(state.float())
    if not _symbolic.get():
        apply = _recurrence if beta is None else _delta_recurrence
        packed = apply(*(tensor.contiguous() for tensor in inputs))
        new = value.shape[1]
        result, after = packed[:, :new], packed[:, new:].squeeze(3).transpose(1, 2)
    else:
        result, after = torch.onnx.ops.symbolic_multi_out(
            f"{RECURRENCE_DOMAIN}::{RECURRENCE if beta is None else DELTA_RECURRENCE}",
            inputs,
            dtypes=[torch.float32] * 2,
            shapes=[inputs[3].shape, state.shape],
            version=1,
        )
    return result.squeeze(3), after


def read_state(state: torch.Tensor | None) -> None:
    """Remember a layer's recurrent state, for functions that transformers calls without it."""
    _state.set(state)
    _heads_read.set(0)


def _selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Mamba's: `hidden_states, dt, z: (batch, channels, tokens)`, `A: (channels, size)`, `B, C: (batch, size, tokens)`."""
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)
    step, inputs = (tensor.float().transpose(1, 2).unsqueeze(2) for tensor in (dt, hidden_states))
    result, after = recur(
        step.unsqueeze(3),
        B.transpose(1, 2).unsqueeze(2),
        step * inputs,
        C.transpose(1, 2).unsqueeze(2),
        rate=A.transpose(0, 1),
        state=_next_state(),
    )
    result = result.squeeze(2).transpose(1, 2)
    if D is not None:
        result = result + hidden_states * D[None, :, None]
    if z is not None:
        result = result * functional.silu(z)
    return (result, after) if return_last_state else result


def _next_state() -> torch.Tensor | None:
    """The state of the layer that is being computed; Zamba has one for each of its heads, and asks head by head."""
    state = _state.get()
    if state is None or state.ndim == 4:
        return state
    head = _heads_read.get()
    _heads_read.set(head + 1)
    return state[:, head]


def _chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Mamba-2's: `hidden_states: (batch, tokens, heads, head_size)`, `dt: (batch, tokens, heads)`, `A: (heads,)`, `B, C:
    (batch, tokens, groups, size)`.
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
    inputs, heads = hidden_states.float(), hidden_states.shape[2]
    B, C = (_repeated(tensor, heads, 2) for tensor in (B, C))
    result, after = recur(
        dt[..., None, None],
        B,
        inputs * dt[..., None],
        C,
        rate=A.float()[:, None, None],
        state=initial_states,
    )
    if D is not None:
        result = result + D[..., None] * inputs
    return (result, after) if return_final_states else result


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> Any:
    """The gated delta rule, of Kimi's linear attention, too: `query, key: (batch, tokens, groups, keys)`, `value: (batch,
    tokens, heads, values)`, `beta: (batch, tokens, heads)`, `g` like `beta` or with a value for each of the keys.
    """
    heads, dtype = value.shape[2], query.dtype
    query, key = (_repeated(tensor, heads, 2) for tensor in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = (t * torch.rsqrt((t * t).sum(dim=-1, keepdim=True) + 1e-6) for t in (query, key))
    decay = g[..., None] if g.ndim == 4 else g[..., None, None]
    result, after = recur(decay, key, value, query * key.shape[-1] ** -0.5, beta=beta, state=initial_state)
    return result.to(dtype), after if output_final_state else None


def _repeated(tensor: torch.Tensor, heads: int, axis: int) -> torch.Tensor:
    """Each group `heads / groups` times, in float32."""
    groups = tensor.shape[axis]
    return tensor.float() if groups == heads else tensor.float().repeat_interleave(heads // groups, dim=axis)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mamba_selective_scan": _selective_scan,
    "mamba2_chunk_scan": _chunk_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
}
"""By the names that they have in the modules of transformers' models (5.23 and 5.24)."""


@contextmanager
def recurrent(model: torch.nn.Module, *, symbolic: bool = False) -> Iterator[None]:
    """The model with our functions, and its own again afterwards.

    Args:
        model: Whose modules' functions are meant.
        symbolic: Whether the operator is left in the trace as a node of ONNX, to be lowered there.
    """
    names = sorted({type(one).__module__ for one in model.modules()})
    # A class may outlive the module that it was made in.
    modules = [module for name in names if (module := sys.modules.get(name)) is not None]
    replaced = [
        (module, name, getattr(module, name)) for module in modules for name in _FUNCTIONS if hasattr(module, name)
    ]
    tokens = (_symbolic.set(symbolic), _state.set(None))
    for module, name, _ in replaced:
        setattr(module, name, _FUNCTIONS[name])
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)
        _symbolic.reset(tokens[0])
        _state.reset(tokens[1])
