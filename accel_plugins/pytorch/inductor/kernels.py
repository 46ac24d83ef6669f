"""Triton kernels for operations that PyTorch's compiler does not support or computes slowly.

The operations are attention with a padding mask, attention of one new token per row to a KV cache, GELU with float8
output, and products with packed weights of 4 or 8 bits.
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
# Number of blocks of 128 weights in a row that one program of `few_rows_product` loads at a time, and its warps. Each
# program computes `32 / bits` outputs. Measured on an H200 for 4 bits and one row, in microseconds: 7.8 for 6,144
# outputs and 4,096 inputs, 25.5 for 28,672 and 4,096, 16.0 for 4,096 and 14,336; 20 other choices take up to twice as
# long.
_PACKED_BLOCKS, _PACKED_WARPS = 16, 2


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


def few_rows_product(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply a few rows with a packed weight; the sums are in float32. Each row reads the weight again.

    Args:
        x: Contiguous tensor `(rows, inputs)` of float16 or bfloat16 on a GPU; the number of inputs is even.
        packed: Integers of the weight, contiguous; see `weight_only.pack_rows`.
        scales: Scales of the weight, contiguous.

    Returns:
        The products `(rows, outputs)` in the data type of `x`.
    """
    rows, inputs = x.shape
    outputs, blocks, words = packed.shape
    bits = words // 4
    together = 32 // bits
    out = x.new_empty(rows, outputs)
    with torch.cuda.device(x.device):
        _few_rows_product[rows, -(-outputs // together)](
            x, packed, scales, out, pairs=inputs // 2, outputs=outputs, blocks=blocks, bits=bits,
            together=together, count=min(_PACKED_BLOCKS, 1 << (blocks - 1).bit_length()), num_warps=_PACKED_WARPS,
        )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _few_rows_product(  # type: ignore[no-untyped-def]
    x, packed, scales, out, pairs: tl.constexpr, outputs: tl.constexpr, blocks: tl.constexpr, bits: tl.constexpr,
    together: tl.constexpr, count: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of one row (Triton kernel).

    A weight of 4 bits becomes a part of the bits of a float32 number between 1 and 2, which takes one instruction. The
    sum of these numbers is corrected by the sum of the inputs.
    """
    row = tl.program_id(0)
    output = (tl.program_id(1) * together + tl.arange(0, together)).to(tl.int64)
    words: tl.constexpr = 4 * bits
    places = tl.arange(0, count * words)
    # The inputs are read as pairs of 16 bits, so that they have the memory layout of the words.
    pair = (x + row * (2 * pairs)).to(tl.pointer_type(tl.int32))
    sums = tl.zeros([together, count], tl.float32)
    for start in range(0, blocks, count):
        block = start + tl.arange(0, count)
        word = start * words + places
        valid = (output[:, None] < outputs) & (word[None] < blocks * words)
        packs = tl.load(packed + output[:, None] * (blocks * words) + word[None], mask=valid, other=0)
        valid = (output[:, None] < outputs) & (block[None] < blocks)
        scale = tl.load(scales + output[:, None] * blocks + block[None], mask=valid, other=0.0).to(tl.float32)
        first = start * 64 + places // words * 64 + places % words
        part = tl.zeros([together, count * words], tl.float32)
        offset = tl.zeros([count * words], tl.float32)
        for i in tl.static_range(16 // bits):
            column = first + i * words
            both = tl.load(pair + column, mask=column < pairs, other=0)
            if x.dtype.element_ty == tl.bfloat16:
                near = (both << 16).to(tl.float32, bitcast=True)
                far = (both & -65536).to(tl.float32, bitcast=True)
            else:
                near = (both & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                far = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            if bits == 4:
                # Move the two integers to bits 12 to 19.
                if i == 0:
                    moved = packs << 12
                elif i == 1:
                    moved = packs << 4
                elif i == 2:
                    moved = packs >> 4
                else:
                    moved = packs >> 12
                part += (near * 2048.0)[None] * _in_float(moved, 12)
                part += (far * 128.0)[None] * _in_float(moved, 16)
                offset += near * (2048.0 + 8.0) + far * (128.0 + 8.0)
            else:
                part += near[None] * ((packs >> (16 * i)) & 255).to(tl.float32)
                part += far[None] * ((packs >> (16 * i + 8)) & 255).to(tl.float32)
                offset += (near + far) * 128.0
        by_block = tl.reshape(part - offset[None], [together, count, words])
        sums += tl.sum(by_block, 2) * scale
    total = tl.sum(sums, 1)
    tl.store(out + row * outputs + output, total.to(out.dtype.element_ty), mask=output < outputs)


@triton.jit  # type: ignore[untyped-decorator]
def _in_float(moved, start: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the float32 number 1 + n / 2 ** (23 - start), where n are the 4 bits from bit `start` on."""
    code: tl.constexpr = (
        "lop3.b32 $0, $1, 0xF000, 0x3F800000, 0xEA;" if start == 12 else "lop3.b32 $0, $1, 0xF0000, 0x3F800000, 0xEA;"
    )
    number = tl.inline_asm_elementwise(code, "=r,r", [moved], dtype=tl.int32, is_pure=True, pack=1)
    return number.to(tl.float32, bitcast=True)


def unpacked_rows(packed: torch.Tensor, scales: torch.Tensor, inputs: int) -> torch.Tensor:
    """Dequantize a packed weight.

    Args:
        packed: Integers of the weight on a GPU, contiguous; see `weight_only.pack_rows`.
        scales: Scales of the weight in float16 or bfloat16, contiguous.
        inputs: Number of inputs, which is even.

    Returns:
        The weight `(outputs, inputs)` in the data type of the scales.
    """
    outputs, blocks, words = packed.shape
    out = scales.new_empty(outputs, inputs)
    count = min(_PACKED_BLOCKS, 1 << (blocks - 1).bit_length())
    with torch.cuda.device(packed.device):
        _unpacked_rows[outputs, -(-blocks // count)](
            packed, scales, out, pairs=inputs // 2, blocks=blocks, bits=words // 4, count=count, num_warps=_PACKED_WARPS
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _unpacked_rows(  # type: ignore[no-untyped-def]
    packed, scales, out, pairs: tl.constexpr, blocks: tl.constexpr, bits: tl.constexpr, count: tl.constexpr
):
    """Dequantize some blocks of one row (Triton kernel)."""
    output = tl.program_id(0).to(tl.int64)
    words: tl.constexpr = 4 * bits
    places = tl.arange(0, count * words)
    word = tl.program_id(1) * (count * words) + places
    packs = tl.load(packed + output * (blocks * words) + word, mask=word < blocks * words, other=0)
    scale = tl.load(scales + output * blocks + word // words, mask=word < blocks * words, other=0.0).to(tl.float32)
    first = word // words * 64 + word % words
    pair = (out + output * (2 * pairs)).to(tl.pointer_type(tl.int32))
    kind = out.dtype.element_ty
    for i in tl.static_range(16 // bits):
        column = first + i * words
        near = ((packs >> (2 * bits * i)) & (2**bits - 1)) - 2 ** (bits - 1)
        far = ((packs >> (2 * bits * i + bits)) & (2**bits - 1)) - 2 ** (bits - 1)
        low = (near.to(tl.float32) * scale).to(kind).to(tl.int16, bitcast=True).to(tl.int32)
        high = (far.to(tl.float32) * scale).to(kind).to(tl.int16, bitcast=True).to(tl.int32)
        tl.store(pair + column, (low & 65535) | (high << 16), mask=column < pairs)
