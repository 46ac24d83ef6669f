"""ONNX Runtime's attention operators for decoders, inserted into the trace of a generative model.

`GroupQueryAttention` appends the new keys and values to the KV cache, without a copy if the past input and the present
output share a buffer. The operator does not repeat the key-value heads in memory. `MultiHeadAttention` is used for
cross-attention, whose keys and values do not change. Specification: docs/ContribOperators.md of ONNX Runtime.
"""

from __future__ import annotations

from typing import Any

import torch

_DOMAIN = "com.microsoft"
# `GroupQueryAttention` accepts only head sizes that are a multiple of this number.
_HEAD_SIZE_MULTIPLE = 8


class OrtAttention:
    """Attention functions that add ONNX Runtime's operators to a trace; see `accel.capture.FusedAttention` for the shapes."""

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
        """Add `GroupQueryAttention` to the trace; return `None` for head sizes that the operator does not support.

        The attention output has the shape `(batch, sequence, heads, head_size)`. The returned keys and values are the
        complete KV cache: those of earlier tokens and of the new tokens.
        """
        batch, heads, sequence, size = query.shape
        kv_heads = key.shape[1]
        if size % _HEAD_SIZE_MULTIPLE or value.shape[3] != size or past[0].shape[3] != size:
            return None
        attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": scale}
        if softcap:
            attributes["softcap"] = float(softcap)
        inputs = [_merged(query), _merged(key), _merged(value), *past, lengths, total, None, None, None, bias, sinks]
        buffer = [batch, kv_heads, past[0].shape[2], size]
        result, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            f"{_DOMAIN}::GroupQueryAttention",
            inputs if sinks is not None else inputs[:-1],
            attributes,
            dtypes=[query.dtype] * 3,
            shapes=[[batch, sequence, heads * size], buffer, buffer],
            version=1,
        )
        return result.reshape(batch, sequence, heads, size), present_key, present_value

    def plain(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor | None:
        """Add `MultiHeadAttention` to the trace; return `None` for heads that the operator does not support.

        The operator requires the same number of heads and the same head size for queries, keys and values. Keys and
        values have the shape `(batch, heads, sequence, head_size)`.
        The output has the shape `(batch, sequence, heads, head_size)`.
        """
        batch, heads, sequence, size = query.shape
        if key.shape[1] != heads or value.shape[3] != size:
            return None
        result = torch.onnx.ops.symbolic(
            f"{_DOMAIN}::MultiHeadAttention",
            [_merged(query), key, value, None, None, bias],
            {"num_heads": heads, "scale": scale},
            dtype=query.dtype,
            shape=[batch, sequence, heads * size],
            version=1,
        )
        return result.reshape(batch, sequence, heads, size)


def _merged(states: torch.Tensor) -> torch.Tensor:
    """Reshape `(batch, heads, sequence, head_size)` to `(batch, sequence, heads * head_size)`."""
    batch, heads, sequence, size = states.shape
    return states.transpose(1, 2).reshape(batch, sequence, heads * size)
