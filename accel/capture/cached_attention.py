"""Replacements of a generating model's KV cache and attention function during its trace.

Both use transformers' registries. The cache layers hold graph inputs. The attention function passes query, keys, values and
the past to the fused operator of the backend.
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
    """A backend's fused attention operators, called while the model is traced. Each method may return `None` to decline.

    Shapes: `query` is `(batch, heads, sequence, head_size)`, `key` and `value` are `(batch, kv_heads, length, head_size)`.
    `bias` is added to the attention scores and broadcasts to `(batch, heads, sequence, length)`.
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
        """Append the new keys and values to the past, and attend to all keys and values.

        Args:
            query, key, value: Query, keys and values of the new tokens, in the shapes that the class lists.
            past: Key buffer and value buffer, each `(batch, kv_heads, capacity, head_size)`.
            lengths: `(batch,)` int32: the last valid position of each row.
            total: Scalar int32: number of tokens after this call.
            bias: `(batch or 1, heads or 1, sequence, capacity)`, added to the attention scores.
            scale, softcap: The scaling factor and the soft cap of the scores, as in transformers' attention functions.
            sinks: `(heads,)`: the attention sinks (`s_aux` in transformers).

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
        """Compute attention without a cache. Returns `(batch, sequence, heads, head_size)`."""


class CacheLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """Keys and values of one layer, `(batch, kv_heads, length, head_size)`: graph inputs before `update`, graph outputs after it.

    Every layer caches all tokens, also with sliding-window attention: the mask hides the tokens outside the window. If `roomy`,
    the past is a buffer with room for more tokens. Without a fused operator that writes into such a buffer, backends keep
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
        # For sparse attention: keys `(batch, length, size)` of the indexer, which selects the tokens to attend to.
        self.indexer_keys = indexer

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing, because the tensors already exist."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values `(batch, kv_heads, new, head_size)` and return all of them.

        A fused attention operator reads `past` and `added` instead of the returned tensors.
        """
        self.added = (keys, values)
        before, length = self.past, self._total - self._new
        if self._roomy:
            before = (before[0][:, :, :length], before[1][:, :, :length])
        self.keys, self.values = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append new keys of the sparse-attention indexer, `(batch, new, size)`, and return all of them."""
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
    """State of one trace, read by the attention function."""

    def __init__(self, fusion: FusedAttention | None, layers: list[Any], batch: Any, total: Any) -> None:
        self.fusion = fusion
        self.layers = [layer for layer in layers if isinstance(layer, CacheLayer)]
        self.lengths = torch.full((batch,), total - 1, dtype=torch.int32)
        self.total = torch.scalar_tensor(total, dtype=torch.int32)

    def layer_of(self, key: torch.Tensor, value: torch.Tensor) -> CacheLayer | None:
        """Return the cache layer that returned these keys and values.

        Return `None` if the model computed new tensors from them (DiffLlama's pairs of heads).
        """
        return next(
            (one for one in self.layers if one.added is not None and one.keys is key and one.values is value), None
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
    """Compute attention for transformers' models while a part is traced, with the fused operator where it accepts the call."""
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
    # Imported here, because the module imports PyTorch's compiler: two thirds of the imports of loading an artifact.
    from transformers.integrations.sdpa_attention import repeat_kv

    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    if softcap is None and sinks is None:
        # OpenVINO's CPU plugin fuses this operator with the cache.
        result = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
        # Contiguous as in transformers, because some models call `view` on the result (AFMoE).
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
    """Run the model with accel's attention function on the given cache layers."""
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
