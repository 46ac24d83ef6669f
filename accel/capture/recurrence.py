"""Trace recurrent layers (state-space models, linear attention) as one operator.

transformers writes these recurrences as Python loops over tokens or chunks. A trace would unroll the loops for the length of
its sample. Most of the loops also start from an empty state when they read several tokens. During a trace, the functions in
this module replace transformers' functions of the same names. They pass their inputs to `accel::recurrence`. Each backend
lowers this operator to its own loop, which takes any initial state and any number of tokens.
"""

# ruff: noqa: N803, N806 (A, B, C and D are the names in the papers, and transformers passes them by name)
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional

from ..upstream.replaced_attributes import replaced_attributes
from .symbolic_operators import leaves_nodes

RECURRENCE_DOMAIN = "accel"
RECURRENCE, DELTA_RECURRENCE = "recurrence", "delta_recurrence"
_state: ContextVar[torch.Tensor | None] = ContextVar("accel_recurrent_state", default=None)
_heads_read: ContextVar[int] = ContextVar("accel_heads_read", default=0)


def _scan(
    decay: torch.Tensor,
    rate: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query: torch.Tensor,
    *beta_and_state: torch.Tensor,
) -> torch.Tensor:
    """Return the results `(batch, tokens, heads, 1, values)` with the final state appended along the token axis.

    The state is appended as one row for each key. It is one tensor, because OpenVINO's converter gives a custom operator one
    result.
    """
    *beta, state = beta_and_state
    results = []
    for t in range(key.shape[1]):
        state = state * torch.exp(decay[:, t] * rate)
        new = value[:, t]
        if beta:
            new = (new - (state * key[:, t]).sum(2, keepdim=True)) * beta[0][:, t]
        state = state + key[:, t] * new
        results.append(query[:, t] @ state)
    return torch.cat([torch.stack(results, dim=1), state.transpose(1, 2).unsqueeze(3)], dim=1)


def _packed_like(*inputs: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor with the shape of `_scan`'s result."""
    value, state = inputs[3], inputs[-1]
    batch, new, heads, _, values = value.shape
    return value.new_empty((batch, new + state.shape[2], heads, 1, values))


def _operator(name: str, inputs: str) -> Any:
    schema = f"({', '.join(f'Tensor {word}' for word in inputs.split())}) -> Tensor"
    operator = torch.library.custom_op(f"{RECURRENCE_DOMAIN}::{name}", _scan, mutates_args=(), schema=schema)
    operator.register_fake(_packed_like)
    return operator


_recurrence = _operator(RECURRENCE, "decay rate key value query state")
_delta_recurrence = _operator(DELTA_RECURRENCE, "decay rate key value query beta state")


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
    """Write each token into a decaying state and read the state.

    Each token updates the state and then reads it: `state = state * exp(decay * rate) + key^T value`, `result = query state`.

    Args:
        decay: `(batch, tokens, heads, keys or 1, values or 1)`.
        key, query: `(batch, tokens, heads, keys)`.
        value: `(batch, tokens, heads, values)`.
        rate: Broadcasts to `(heads, keys, values)`. Default: 1.
        beta: `(batch, tokens, heads)`. Selects the delta rule: the value that the decayed state returns for the key is
            subtracted from the new value, and the difference is written with the weight `beta`.
        state: Initial state `(batch, heads, keys, values)`. Default: zeros.

    Returns:
        The results `(batch, tokens, heads, values)` and the final state, both in float32.
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
    if not leaves_nodes():
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
    """Store the recurrent state of the current layer for functions that transformers calls without it."""
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
    """Mamba's scan. `hidden_states, dt, z: (batch, channels, tokens)`, `A: (channels, size)`, `B, C: (batch, size, tokens)`."""
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
    """Return the recurrent state of the current layer. Zamba has one state for each head and calls this once for each head."""
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
    """Mamba-2's scan.

    Shapes: `hidden_states: (batch, tokens, heads, head_size)`, `dt: (batch, tokens, heads)`, `A: (heads,)`,
    `B, C: (batch, tokens, groups, size)`.
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
    """The gated delta rule, also for Kimi's linear attention.

    Shapes: `query, key: (batch, tokens, groups, keys)`, `value: (batch, tokens, heads, values)`, `beta: (batch, tokens, heads)`.
    `g` has the shape of `beta`, or an additional last axis of keys.
    """
    heads, dtype = value.shape[2], query.dtype
    query, key = (_repeated(tensor, heads, 2) for tensor in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = (t * torch.rsqrt((t * t).sum(dim=-1, keepdim=True) + 1e-6) for t in (query, key))
    decay = g[..., None] if g.ndim == 4 else g[..., None, None]
    result, after = recur(decay, key, value, query * key.shape[-1] ** -0.5, beta=beta, state=initial_state)
    return result.to(dtype), after if output_final_state else None


def _repeated(tensor: torch.Tensor, heads: int, axis: int) -> torch.Tensor:
    """Repeat each group `heads / groups` times along an axis, in float32."""
    groups = tensor.shape[axis]
    return tensor.float() if groups == heads else tensor.float().repeat_interleave(heads // groups, dim=axis)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mamba_selective_scan": _selective_scan,
    "mamba2_chunk_scan": _chunk_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
}
"""Replacements by the names of the functions in transformers' model modules (5.23 and 5.24)."""


@contextmanager
def recurrent(model: torch.nn.Module) -> Iterator[None]:
    """Replace the recurrence functions in the modules of the model's code by accel's functions."""
    names = sorted({type(one).__module__ for one in model.modules()})
    # A class may exist longer than its module.
    modules = [module for name in names if (module := sys.modules.get(name)) is not None]
    token = _state.set(None)
    try:
        with replaced_attributes(
            (module, name, ours) for module in modules for name, ours in _FUNCTIONS.items() if hasattr(module, name)
        ):
            yield
    finally:
        _state.reset(token)
