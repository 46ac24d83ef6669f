"""Replacements of recurrent layers (state-space models, linear attention) by one operator during a trace.

In transformers, these layers are Python loops over tokens or chunks of tokens. A trace would unroll a loop for the length of the
sample. Most loops also ignore the cached state if a call has several tokens. During a trace, the functions in this module replace
functions of transformers. They pass their inputs to the operator `accel::recurrence`. Each backend converts this operator to a loop of
its runtime, which accepts any initial state and any number of tokens.
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
from .custom_operator_forms import leaves_nodes

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
    """Return the results `(batch, tokens, heads, 1, values)` of the recurrence, with the final state appended along the token axis.

    The state is appended as one row for each key. The operator returns a single tensor, because OpenVINO's converter supports only one
    result of a custom operator.
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
    """Compute a linear recurrence over the tokens.

    Each token first updates the state, `state = state * exp(decay * rate) + key^T value`, and then reads it, `result = query state`.

    Args:
        decay: Decay of each token, `(batch, tokens, heads, keys or 1, values or 1)`.
        key, query: Keys and queries, `(batch, tokens, heads, keys)`.
        value: Values, `(batch, tokens, heads, values)`.
        rate: Factor of the decay that can be broadcast to `(heads, keys, values)`. `None` means 1.
        beta: Weights `(batch, tokens, heads)` of the delta rule, or `None` for no delta rule. With the delta rule, the result of the
            decayed state for the key is subtracted from the new value, and the difference times `beta` is added to the state.
        state: Initial state `(batch, heads, keys, values)`. `None` means zeros.

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
    """Store the recurrent state of the current layer for `_selective_scan`, because transformers does not pass the state to it."""
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
    """Compute Mamba's selective scan with `recur`.

    The shapes are `hidden_states, dt, z: (batch, channels, tokens)`, `A: (channels, size)` and `B, C: (batch, size, tokens)`.
    """
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
    """Return the recurrent state of the current layer.

    In Zamba, a layer has one state for each head and calls the scan once for each head. So each call returns the state of the next head.
    """
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
    """Compute Mamba-2's scan with `recur`.

    The shapes are `hidden_states: (batch, tokens, heads, head_size)`, `dt: (batch, tokens, heads)`, `A: (heads,)` and
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
    """Compute the gated delta rule and Kimi's linear attention with `recur`.

    The shapes are `query, key: (batch, tokens, groups, keys)`, `value: (batch, tokens, heads, values)` and
    `beta: (batch, tokens, heads)`. `g` has the shape of `beta`, or an additional last axis for the keys.
    """
    heads, dtype = value.shape[2], query.dtype
    query, key = (_repeated(tensor, heads, 2) for tensor in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = (t * torch.rsqrt((t * t).sum(dim=-1, keepdim=True) + 1e-6) for t in (query, key))
    decay = g[..., None] if g.ndim == 4 else g[..., None, None]
    result, after = recur(decay, key, value, query * key.shape[-1] ** -0.5, beta=beta, state=initial_state)
    return result.to(dtype), after if output_final_state else None


def _repeated(tensor: torch.Tensor, heads: int, axis: int) -> torch.Tensor:
    """Convert a tensor to float32, and repeat each group `heads / groups` times along the given axis."""
    groups = tensor.shape[axis]
    return tensor.float() if groups == heads else tensor.float().repeat_interleave(heads // groups, dim=axis)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mamba_selective_scan": _selective_scan,
    "mamba2_chunk_scan": _chunk_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
}
"""Replacements by the name of the replaced function in the model modules of transformers (5.23 and 5.24)."""


@contextmanager
def recurrent(model: torch.nn.Module) -> Iterator[None]:
    """Replace the recurrence functions in the Python modules of the model by accel's functions while the context is open."""
    names = sorted({type(module).__module__ for module in model.modules()})
    # A Python module may be missing in sys.modules although its classes still exist.
    modules = [module for name in names if (module := sys.modules.get(name)) is not None]
    token = _state.set(None)
    try:
        with replaced_attributes(
            (module, name, ours) for module in modules for name, ours in _FUNCTIONS.items() if hasattr(module, name)
        ):
            yield
    finally:
        _state.reset(token)
