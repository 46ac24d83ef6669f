"""Linear layers with quantized weights for decoding steps on GPUs; the activations stay in floating point.

A decoding step with few rows reads each weight once, so its time is the time to read the weights. With 4 bits, a step
reads a quarter of the bytes of float16. The layer that computes the logits has 8 bits, because its errors change the
logits directly. Each block of 128 weights in a row has one scale.

For few rows, a kernel multiplies with the packed weights. For more rows, such as prompts, the weight is dequantized
before each product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, pad

from .fusible_layers import side_by_side

BLOCK = 128
"""Number of weights in a row that share a scale."""
# Bits of a weight: of the layer that computes logits, and of all other layers.
_LOGITS_BITS, _BITS = 8, 4
# Largest number of input rows for which the kernel multiplies with packed weights. For 28,672 outputs and 4,096 inputs on
# an H200, the kernel takes 20 microseconds for each row (measured for two to eight rows). Dequantizing and multiplying
# moves 530 MB, which takes at least 126 microseconds (computed).
_FEW_ROWS = 6
# Number of weights that are quantized at a time, to limit the memory for intermediate results.
_QUANTIZED_TOGETHER = 1 << 25
# Candidates for the scale of a block, as fractions of the scale for which the largest weight fits exactly.
_SHRINKING = (1.0, 0.93, 0.86)
_HALF = (torch.float16, torch.bfloat16)


class WeightOnlyLinear(torch.nn.Module):
    """Linear layer whose weight is a range of rows of a packed weight. Several layers may share the packed weight.

    Args:
        layer: The layer to replace.
        packed: Packed weights of all layers that share the tensor; see `pack_rows`.
        scales: Scales of all layers; see `pack_rows`.
        bias: Bias of all layers, `(output features of all layers,)`, or `None`.
        rows: The weight rows of this layer.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor | None

    def __init__(
        self, layer: torch.nn.Linear, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, rows: slice
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rows = layer.in_features, layer.out_features, rows
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("biases", bias, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """Dequantized weight in the original data type. Some model code reads the weight of a layer or the data type of
        the weight.
        """
        return dequantized(self.packed[self.rows], self.scales[self.rows], self.in_features)

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias of this layer, or `None`."""
        return None if self.biases is None else self.biases[self.rows]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the linear layer; the output has the data type of `x`."""
        output: torch.Tensor = LINEAR(x, self.packed[self.rows], self.scales[self.rows], self.bias)
        return output


def pack_layers(model: Any) -> int:
    """Replace the linear layers of a model by layers with packed weights, and return the number of replaced layers.

    Layers of one module with the same number of inputs share a packed weight, so that their products can be joined.
    Layers with an odd number of inputs are not replaced.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    count = 0
    for parent in list(model.modules()):
        names = {id(layer): name for name, layer in parent.named_children()}
        for group in side_by_side(parent):
            bodies = [layer for layer in group if layer is not head]
            heads = [layer for layer in group if layer is head]
            for layers, bits in ((bodies, _BITS), (heads, _LOGITS_BITS)):
                if not layers or layers[0].in_features % 2:
                    continue
                for layer, quantized in zip(layers, _quantized(layers, bits), strict=True):
                    setattr(parent, names[id(layer)], quantized)
                count += len(layers)
    return count


def _quantized(layers: list[torch.nn.Linear], bits: int) -> list[WeightOnlyLinear]:
    pieces = [pack_rows(layer.weight.detach(), bits) for layer in layers]
    packed, scales = (torch.cat([piece[i] for piece in pieces]) for i in range(2))
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    quantized_layers, start = [], 0
    for layer in layers:
        rows = slice(start, start + layer.out_features)
        quantized_layers.append(WeightOnlyLinear(layer, packed, scales, bias, rows))
        start = rows.stop
    return quantized_layers


def pack_rows(weight: torch.Tensor, bits: int = _BITS) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight `(outputs, inputs)` with 4 or 8 bits. The last block of a row is filled with zeros.

    Returns:
        The integers `(outputs, blocks, 4 * bits) int32`, and the scales `(outputs, blocks)` in the weight's data type. A
        word contains `32 / bits` integers, to which `2 ** (bits - 1)` is added. Integer `2 * i + j` (`j` is 0 or 1) of
        word `k` of a block is weight `i * 8 * bits + 2 * k + j` of the block. So a thread that reads neighbouring words
        needs neighbouring pairs of inputs.
    """
    rows = max(1, _QUANTIZED_TOGETHER // max(1, weight.shape[1]))
    parts = [_packed(part, bits) for part in torch.split(weight, rows)]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _packed(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = 1 << (bits - 1)
    blocks = pad(weight.float(), (0, -weight.shape[1] % BLOCK)).view(weight.shape[0], -1, BLOCK)
    # The weight with the largest absolute value becomes -top, which has no positive counterpart.
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -top
    least: torch.Tensor | None = None
    best = scales = torch.empty(0)
    for fraction in _SHRINKING:
        candidate = (extreme * fraction).to(weight.dtype)
        steps = torch.where(candidate == 0, 1.0, candidate.float())
        values = (blocks / steps).round_().clamp_(-top, top - 1)
        error = (values * steps - blocks).square_().sum(-1, keepdim=True)
        if least is None:
            least, best, scales = error, values, candidate
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, values, best)
        scales = torch.where(better, candidate, scales)
    integers = (best + top).to(torch.int32).view(*best.shape[:2], 16 // bits, 4 * bits, 2)
    packed = torch.zeros_like(integers[:, :, 0, :, 0])
    for i in range(32 // bits):
        packed |= integers[:, :, i // 2, :, i % 2] << (bits * i)
    return packed, scales[..., 0]


def dequantized(packed: torch.Tensor, scales: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the weight `(outputs, inputs)` of a packed weight, in the data type of the scales."""
    if packed.is_cuda and scales.dtype in _HALF:
        weight: torch.Tensor = torch.ops.accel.unpacked_rows(packed, scales, inputs)
        return weight
    bits = packed.shape[2] // 4
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device).view(-1, 2)
    values = ((packed[:, :, None, :, None] >> shifts[:, None]) & ((1 << bits) - 1)) - (1 << (bits - 1))
    blocks = values.flatten(2).float() * scales[..., None].float()
    return blocks.flatten(1)[:, :inputs].to(scales.dtype)


def weight_only_linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute a linear layer with a packed weight.

    Args:
        x: Input `(..., input features)`.
        packed: Integers of the weight; see `pack_rows`.
        scales: Scales of the weight; see `pack_rows`.
        bias: Bias `(output features,)` in the data type of `x`, or `None`.
    """
    inputs = x.shape[-1]
    rows = x.numel() // inputs
    if not x.is_cuda or rows > _FEW_ROWS or x.dtype not in _HALF:
        return linear(x, dequantized(packed, scales, inputs).to(x.dtype), bias)
    product: torch.Tensor = torch.ops.accel.few_rows_product(x.reshape(rows, inputs), packed, scales)
    output = product.view(*x.shape[:-1], packed.shape[0])
    return output if bias is None else output + bias


def _few_rows_product(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    # Triton is installed only with PyTorch's builds for GPUs.
    from .kernels import few_rows_product

    return few_rows_product(x.contiguous(), packed, scales)


def _unpacked_rows(packed: torch.Tensor, scales: torch.Tensor, inputs: int) -> torch.Tensor:
    from .kernels import unpacked_rows

    return unpacked_rows(packed, scales, inputs)


# `weight_only_linear` is an operator, so that each call is a single node in the graph when the graph pass runs. The
# compiler decomposes this node after the graph pass. The operators of the kernels stay in the graph: the compiler would
# trace a Triton kernel again for each of its calls, which takes minutes for a model with 129 products.
_LIBRARY: Any = torch.library.Library("accel", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("weight_only_linear(Tensor x, Tensor packed, Tensor scales, Tensor? bias) -> Tensor")
_LIBRARY.impl("weight_only_linear", weight_only_linear, "CompositeImplicitAutograd")
LINEAR: Any = torch.ops.accel.weight_only_linear.default
_LIBRARY.define("few_rows_product(Tensor x, Tensor packed, Tensor scales) -> Tensor")
_LIBRARY.impl("few_rows_product", _few_rows_product, "CUDA")
torch.library.register_fake(
    "accel::few_rows_product", lambda x, packed, _: x.new_empty(x.shape[0], packed.shape[0]), lib=_LIBRARY
)
_LIBRARY.define("unpacked_rows(Tensor packed, Tensor scales, int inputs) -> Tensor")
_LIBRARY.impl("unpacked_rows", _unpacked_rows, "CUDA")
torch.library.register_fake(
    "accel::unpacked_rows", lambda packed, scales, inputs: scales.new_empty(packed.shape[0], inputs), lib=_LIBRARY
)
