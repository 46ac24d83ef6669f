"""The cache and the attention that a generating model's own code meets while it is traced.

Both go through transformers' registries: a cache whose layers hold graph inputs, and an attention function that hands
query, keys, values and past to the backend's fused operator.
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
    """A backend's attention operators, called while the model is traced. Each may decline with `None`.

    `query` is `(batch, heads, sequence, head_size)`, `key` and `value` `(batch, kv_heads, length, head_size)`, `bias` is
    added to the scores and broadcasts to `(batch, heads, sequence, length)`.
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
        """Write the new keys and values behind the past and attend to all of them.

        Args:
            query, key, value: Of the new tokens; the class states their shapes.
            past: `(batch, kv_heads, capacity, head_size)` buffers.
            lengths: `(batch,)` int32, the last valid position of each row.
            total: Scalar int32, tokens after this call.
            bias: `(batch or 1, heads or 1, sequence, capacity)`, added to the scores.
            scale, softcap: As in transformers' attention functions.
            sinks: `(heads,)`, as there.

        Returns:
            The result `(batch, sequence, heads, head_size)`, and the buffers after the call.
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
        """Attention without a cache; returns `(batch, sequence, heads, head_size)`."""


class CacheLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer's keys and values, `(batch, kv_heads, length, head_size)`: graph inputs before `update`, graph outputs after it.

    All layers hold all tokens: what a sliding window hides, the mask hides. A roomy past is a buffer with room for more
    tokens; without a fused operator that writes there, backends keep exactly the tokens before the call.
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
        # Of sparse attention, `(batch, length, size)`: what chooses the tokens that are attended to.
        self.indexer_keys = indexer

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing: the tensors are there."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values so far, from new ones `(batch, kv_heads, new, head_size)`; a fused attention reads `past` and
        `added` instead.
        """
        self.added = (keys, values)
        before, length = self.past, self._total - self._new
        if self._roomy:
            before = (before[0][:, :, :length], before[1][:, :, :length])
        self.keys, self.values = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """All keys of the indexer so far, from new ones `(batch, new, size)`."""
        assert self.indexer_keys is not None
        before = self.indexer_keys[:, : self._total - self._new] if self._roomy else self.indexer_keys
        self.indexer_keys = torch.cat([before, indexer_key_states], dim=1)
        return self.indexer_keys

    def tensors(self) -> dict[str, torch.Tensor]:
        """What it keeps, by name."""
        indexer = {} if self.indexer_keys is None else {"indexer": self.indexer_keys}
        return {"key": self.keys, "value": self.values, **indexer}

    def get_seq_length(self) -> Any:
        """Tokens before this call."""
        return self._total - self._new

    def get_mask_sizes(self, _: Any) -> tuple[Any, int]:
        """Tokens after this call, and the first one's position."""
        return self._total, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class _Trace:
    """What the attention function needs while a part is traced."""

    def __init__(self, fusion: FusedAttention | None, layers: list[Any], batch: Any, total: Any) -> None:
        self.fusion = fusion
        self.layers = [layer for layer in layers if isinstance(layer, CacheLayer)]
        self.lengths = torch.full((batch,), total - 1, dtype=torch.int32)
        self.total = torch.scalar_tensor(total, dtype=torch.int32)

    def layer_of(self, key: torch.Tensor, value: torch.Tensor) -> CacheLayer | None:
        """The layer whose keys and values these are; none where the model made others of them (DiffLlama's pairs of heads)."""
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
    """The attention function that transformers' models call while a part is traced."""
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
    """Attention in PyTorch operators, for backends without a fused one."""
    # Imports PyTorch's compiler, two thirds of what loading an artifact would import.
    from transformers.integrations.sdpa_attention import repeat_kv

    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    if softcap is None and sinks is None:
        # In the form that OpenVINO's CPU plugin fuses with the cache.
        result = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
        # Contiguous, as transformers' own: some models view it in another shape (AFMoE).
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
    """The model with our attention function, which reads these layers."""
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
