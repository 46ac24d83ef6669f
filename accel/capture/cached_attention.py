"""KV cache and attention function that replace those of a generating model during its trace.

The keys and values in the cache layers are graph inputs. The attention function is registered in transformers. It passes the query,
the new keys and values, and the cached keys and values to the fused attention operator of the backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin

from ..upstream.attention_choice import attention_of

IMPLEMENTATION = "accel"


class FusedAttention(Protocol):
    """Fused attention operators of a backend, which are called while the model is traced.

    Each method may return `None` if the operator does not support the call. `query` has the shape
    `(batch, heads, sequence, head_size)`. `key` and `value` have the shape `(batch, kv_heads, length, head_size)`. `bias` is added to
    the attention scores and can be broadcast to `(batch, heads, sequence, length)`.
    """

    def cached(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        past: tuple[torch.Tensor, torch.Tensor],
        lengths: torch.Tensor,
        total: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Append the new keys and values to the cached ones, and compute attention to all keys and values.

        Args:
            query, key, value: Query, keys and values of the new tokens, in the shapes that the docstring of the class lists.
            past: Buffer of cached keys and buffer of cached values, each `(batch, kv_heads, capacity, head_size)`.
            lengths: Last valid position of each row, `(batch,)` int32.
            total: Number of tokens after this call, a scalar int32 tensor.
            bias: Tensor that is added to the attention scores, `(batch or 1, heads or 1, sequence, capacity)`.
            scale, softcap: The scaling factor and the soft cap of the scores, as in transformers' attention functions.
            sinks: Attention sinks of each head, `(heads,)` (`s_aux` in transformers).

        Returns:
            The attention output `(batch, sequence, heads, head_size)`, and the key and value buffers after the call.
        """

    def plain(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor | None:
        """Compute attention without a KV cache, and return the result `(batch, sequence, heads, head_size)`."""


class CacheLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """Cached keys and values of one layer, `(batch, kv_heads, length, head_size)`.

    The tensors are graph inputs before `update`, and graph outputs after `update`. Every layer caches all tokens. In layers with
    sliding-window attention, the mask is 0 for the tokens outside of the window. If `roomy` is True, the cached tensors are buffers with
    room for more tokens, and the backend has a fused operator that writes into them. If `roomy` is False, the cached tensors contain
    exactly the tokens before the call.
    """

    is_sliding = False

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        total: Any,
        new: Any,
        *,
        roomy: bool,
        indexer: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device
        self.past = (keys, values)
        self.keys, self.values = keys, values
        self.added: tuple[torch.Tensor, torch.Tensor] | None = None
        self._total, self._new = total, new
        self._roomy = roomy
        # Keys `(batch, length, size)` of the indexer, which selects the tokens for sparse attention (DeepSeek).
        self.indexer_keys = indexer

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing, because the tensors already exist."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values `(batch, kv_heads, new, head_size)`, and return the cached and the new ones together.

        A fused attention operator does not use the returned tensors. It reads `past` and `added`.
        """
        self.added = (keys, values)
        before, length = self.past, self._total - self._new
        if self._roomy:
            before = (before[0][:, :, :length], before[1][:, :, :length])
        self.keys, self.values = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append new keys of the sparse-attention indexer, `(batch, new, size)`, and return the cached and the new keys."""
        assert self.indexer_keys is not None
        before = self.indexer_keys[:, : self._total - self._new] if self._roomy else self.indexer_keys
        self.indexer_keys = torch.cat([before, indexer_key_states], dim=1)
        return self.indexer_keys

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the layer's tensors by name."""
        indexer = {} if self.indexer_keys is None else {"indexer": self.indexer_keys}
        return {"key": self.keys, "value": self.values, **indexer}

    def get_seq_length(self) -> Any:
        """Return the number of tokens before this call."""
        return self._total - self._new

    def get_mask_sizes(self, _: Any) -> tuple[Any, int]:
        """Return the number of tokens after this call, and the position of the first one."""
        return self._total, 0

    def get_max_length(self) -> int:
        """Return -1: the cache has no maximum length."""
        return -1


class _Trace:
    """Settings and cache layers of one trace, which the attention function reads."""

    def __init__(self, fusion: FusedAttention | None, layers: list[Any], batch: Any, total: Any) -> None:
        self.fusion = fusion
        self.layers = [layer for layer in layers if isinstance(layer, CacheLayer)]
        self.lengths = torch.full((batch,), total - 1, dtype=torch.int32)
        self.total = torch.scalar_tensor(total, dtype=torch.int32)

    def layer_of(self, key: torch.Tensor, value: torch.Tensor) -> CacheLayer | None:
        """Return the cache layer whose `update` returned these keys and values.

        Return `None` if the model changed the keys or values after `update`, as DiffLlama does.
        """
        return next(
            (layer for layer in self.layers if layer.added is not None and layer.keys is key and layer.values is value),
            None,
        )


_active: ContextVar[_Trace | None] = ContextVar("accel_trace", default=None)


def _attend(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers' models during a trace.

    The function uses the fused operator of the backend if the operator supports the call, else PyTorch operators.
    """
    bias = attention_mask
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    trace = _active.get()
    layer = trace.layer_of(key, value) if trace is not None else None
    if trace is not None and trace.fusion is not None:
        if layer is not None and layer.added is not None:
            fused = trace.fusion.cached(
                query,
                *layer.added,
                past=layer.past,
                lengths=trace.lengths,
                total=trace.total,
                bias=bias,
                scale=scale,
                softcap=softcap,
                sinks=s_aux,
            )
            if fused is not None:
                result, layer.keys, layer.values = fused
                return result, None
        elif softcap is None and s_aux is None:
            attended = trace.fusion.plain(query, key, value, bias=bias, scale=scale)
            if attended is not None:
                return attended, None
    return _attend_plainly(query, key, value, bias, scale, softcap, s_aux), None


def _attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention with PyTorch operators, for backends without a fused operator."""
    # This import is inside the function, because the module imports PyTorch's compiler. That takes two thirds of the import time that
    # loading an artifact needs.
    from transformers.integrations.sdpa_attention import repeat_kv

    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    if softcap is None and sinks is None:
        # OpenVINO's CPU plugin fuses this operator with the cache.
        result = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
        # The result must be contiguous, as in transformers, because some models call `view` on the result (AFMoE).
        return result.transpose(1, 2).contiguous()
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], 1)
        return (torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ value).transpose(1, 2).contiguous()
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous()


@contextmanager
def tracing(model: Any, fusion: FusedAttention | None, layers: list[Any], batch: Any, total: Any) -> Iterator[None]:
    """Let the model use accel's attention function with the given cache layers while the context is open."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)
    token = _active.set(_Trace(fusion, layers, batch, total))
    try:
        with attention_of(model, IMPLEMENTATION):
            yield
    finally:
        _active.reset(token)
