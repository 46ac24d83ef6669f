"""Triton kernels for operations that PyTorch's compiler does not support or computes slowly.

The operations are attention with a padding mask, attention of one new token per row to a KV cache, and GELU with float8
output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Number of query rows and of key rows that one program loads at a time.
_QUERIES, _KEYS = 64, 128
# Smallest block size. Triton requires powers of two, and at least 16 for matrix products.
_SMALLEST = 16
# Number of bytes of keys, and also of values, that one program of `step_attention` loads at a time.
_LOADED_BYTES = 64 << 10


@torch.library.triton_op(
    "accel::masked_attention",
    mutates_args={},
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor",
)
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Compute attention with a padding mask; the softmax is in float32.

    Args:
        query: Queries `(batch, heads, length, size)` on a GPU, in any layout whose last axis is contiguous.
        key: Keys of the same shape, layout and device.
        value: Values of the same shape, layout and device.
        mask: Padding mask `(batch, length)`, 0 for padding; `None` if there is no padding. The
            output of a row that contains only padding is zero.
        scale: Factor for the products of queries and keys.

    Returns:
        The output `(batch, length, heads, size)`, contiguous.
    """
    batch, heads, length, size = query.shape
    out = query.new_empty(batch, length, heads, size)
    queries, keys = min(_QUERIES, _block(length)), min(_KEYS, _block(length))
    torch.library.wrap_triton(_attention)[batch * heads, -(-length // queries)](
        query, key, value, query if mask is None else mask, out, scale,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], 0 if mask is None else mask.stride(0),
        heads=heads, length=length, size=size, block=_block(size),
        queries=queries, keys=keys, masked=mask is not None, num_warps=4,
    )  # fmt: skip
    return out


def _block(count: int) -> int:
    return max(_SMALLEST, 1 << (count - 1).bit_length())


@triton.jit  # type: ignore[untyped-decorator]
def _attention(  # type: ignore[no-untyped-def]
    query, key, value, mask, out, scale: tl.constexpr,
    query_row: tl.constexpr, query_head: tl.constexpr, query_token: tl.constexpr,
    key_row: tl.constexpr, key_head: tl.constexpr, key_token: tl.constexpr,
    value_row: tl.constexpr, value_head: tl.constexpr, value_token: tl.constexpr, mask_row: tl.constexpr,
    heads: tl.constexpr, length: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
    queries: tl.constexpr, keys: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Compute attention of one block of queries to all keys of the same head and row (Triton kernel)."""
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    tokens = tl.program_id(1) * queries + tl.arange(0, queries)
    features = tl.arange(0, block)
    query_valid = (tokens[:, None] < length) & (features[None] < size)
    place = query + row * query_row + head * query_head
    q = tl.load(place + tokens[:, None] * query_token + features[None], mask=query_valid, other=0.0)
    # exp(x) is computed as exp2(x * log2(e)), because GPUs have an instruction for exp2.
    factor = scale * 1.4426950408889634
    highest = tl.full([queries], -1.0e30, tl.float32)
    total = tl.zeros([queries], tl.float32)
    sums = tl.zeros([queries, block], tl.float32)
    for start in range(0, length, keys):
        others = start + tl.arange(0, keys)
        key_valid = others < length
        place = key + row * key_row + head * key_head
        k = tl.load(
            place + others[None] * key_token + features[:, None],
            mask=key_valid[None] & (features[:, None] < size),
            other=0.0,
        )
        place = value + row * value_row + head * value_head
        v = tl.load(
            place + others[:, None] * value_token + features[None],
            mask=key_valid[:, None] & (features[None] < size),
            other=0.0,
        )
        if masked:
            key_valid = key_valid & (tl.load(mask + row * mask_row + others, mask=key_valid, other=0) != 0)
        scores = tl.where(key_valid[None], tl.dot(q, k) * factor, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp2(scores - top[:, None])
        rescale = tl.exp2(highest - top)
        total = total * rescale + tl.sum(shares, 1)
        sums = sums * rescale[:, None] + tl.dot(shares.to(v.dtype), v)
        highest = top
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    place = out + ((row * length + tokens[:, None]) * heads + head) * size + features[None]
    tl.store(place, result.to(out.dtype.element_ty), mask=query_valid)


@torch.library.triton_op(
    "accel::step_attention",
    mutates_args={},
    schema="(Tensor query, Tensor key, Tensor value, Tensor bias, float scale) -> Tensor",
)
def step_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute attention of one new token per row to all positions of a KV cache, in float32.

    Args:
        query: Queries `(batch, heads, 1, size)` on a GPU, in any layout whose last axis is contiguous.
        key: Keys `(batch, shared, capacity, size)`, last axis contiguous. Each of the `shared` key heads serves `heads
            / shared` query heads.
        value: Values `(batch, shared, capacity, width)`, last axis contiguous.
        bias: Attention mask `(batch, heads, 1, capacity)` in any layout, which is added to the scores.
        scale: Factor for the products of queries and keys.

    Returns:
        The output `(batch, 1, heads, width)`, contiguous.
    """
    batch, heads, _, size = query.shape
    _, shared, capacity, width = value.shape
    block, wide = _block(size), _block(width)
    tokens = min(_block(capacity), max(_SMALLEST, _LOADED_BYTES // (max(block, wide) * key.element_size())))
    out = value.new_empty(batch, 1, heads, width)
    torch.library.wrap_triton(_step_attention)[batch * heads,](
        query, key, value, bias, out, scale,
        *query.stride()[:2], *key.stride()[:3], *value.stride()[:3], bias.stride(0), bias.stride(1), bias.stride(3),
        heads=heads, share=heads // shared, capacity=capacity, size=size, width=width, block=block, wide=wide,
        tokens=tokens, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _step_attention(  # type: ignore[no-untyped-def]
    query, key, value, bias, out, scale: tl.constexpr,
    query_row: tl.constexpr, query_head: tl.constexpr,
    key_row: tl.constexpr, key_head: tl.constexpr, key_token: tl.constexpr,
    value_row: tl.constexpr, value_head: tl.constexpr, value_token: tl.constexpr,
    bias_row: tl.constexpr, bias_head: tl.constexpr, bias_token: tl.constexpr,
    heads: tl.constexpr, share: tl.constexpr, capacity: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, wide: tl.constexpr, tokens: tl.constexpr,
):  # fmt: skip
    """Compute attention of one head in one row of the batch (Triton kernel)."""
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    features = tl.arange(0, block)
    columns = tl.arange(0, wide)
    # exp(x) is computed as exp2(x * log2(e)), because GPUs have an instruction for exp2.
    factor: tl.constexpr = 1.4426950408889634
    q = tl.load(query + row * query_row + head * query_head + features, mask=features < size, other=0.0)
    q = q.to(tl.float32) * (scale * factor)
    highest = float("-inf")
    total = 0.0
    sums = tl.zeros([wide], tl.float32)
    for start in range(0, capacity, tokens):
        others = start + tl.arange(0, tokens)
        key_valid = others < capacity
        k = tl.load(
            key + row * key_row + (head // share) * key_head + others[:, None] * key_token + features[None],
            mask=key_valid[:, None] & (features[None] < size),
            other=0.0,
        )
        v = tl.load(
            value + row * value_row + (head // share) * value_head + others[:, None] * value_token + columns[None],
            mask=key_valid[:, None] & (columns[None] < width),
            other=0.0,
        )
        more = tl.load(bias + row * bias_row + head * bias_head + others * bias_token, mask=key_valid, other=0.0)
        # The bias of a masked token may be the smallest number of the data type. Multiplying it by `factor` would
        # overflow, so the bias is limited first.
        scores = tl.sum(q[None] * k.to(tl.float32), 1) + tl.maximum(more.to(tl.float32), -1.0e30) * factor
        scores = tl.where(key_valid, scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 0))
        shares = tl.exp2(scores - top)
        rescale = tl.exp2(highest - top)
        total = total * rescale + tl.sum(shares, 0)
        sums = sums * rescale + tl.sum(shares[:, None] * v.to(tl.float32), 0)
        highest = top
    place = out + (row * heads + head) * width + columns
    tl.store(place, (sums / total).to(out.dtype.element_ty), mask=columns < width)


@torch.library.triton_op(
    "accel::gelu_rows_in_float8",
    mutates_args={},
    schema="(Tensor x, float largest, float smallest) -> (Tensor, Tensor)",
)
def gelu_rows_in_float8(x: torch.Tensor, largest: float, smallest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute GELU of contiguous rows and round the result to float8.

    GELU is computed with `tanh`; the error is at most 5e-4. Measured times for 8192 rows of 3072 features: 52
    microseconds for the same kernel with the error function instead of `tanh`, and 113 microseconds for the kernels of
    PyTorch's compiler. Reading and writing the tensors takes about 20 microseconds.

    Args:
        x: Tensor `(rows, features)` of 16 or 32 bits on a GPU.
        largest: Number to which the largest absolute value of each row is scaled.
        smallest: Smallest scale. A row that contains only zeros gets this scale.

    Returns:
        The values divided by the scale of their row, `(rows, features) float8_e4m3fn`, and the scales, `(rows, 1)
        float32`.
    """
    rows, features = x.shape
    values = x.new_empty(rows, features, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(rows, 1, dtype=torch.float32)
    torch.library.wrap_triton(_gelu_rows)[rows,](
        x, values, scale, features=features, block=_block(features), largest=largest, smallest=smallest,
        num_warps=8,
    )  # fmt: skip
    return values, scale


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_rows(  # type: ignore[no-untyped-def]
    x, out, scales, features: tl.constexpr, block: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr
):
    """Compute GELU of one row and round the row to float8 (Triton kernel)."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, block)
    value = tl.load(x + row * features + places, mask=places < features, other=0.0).to(tl.float32)
    # 0.5 (1 + tanh(a)) equals 1 / (1 + exp(-2 a)).
    turned = value * (2.302208198 + 0.1029432396 * value * value)
    value = value / (1.0 + tl.exp2(-turned))
    scale = tl.maximum(tl.max(tl.abs(value), 0) / largest, smallest)
    tl.store(scales + row, scale)
    tl.store(out + row * features + places, (value * (1.0 / scale)).to(out.dtype.element_ty), mask=places < features)
