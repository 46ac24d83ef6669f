"""Quantized linear layers as GPTQ, AWQ and compressed-tensors store them, and their conversion to `BlockLinear` layers.

The layouts of the packed weights are described in the documentation of AutoGPTQ (`qweight`, `qzeros`, `scales`, `g_idx`), AutoAWQ (version
`gemm`) and compressed-tensors (`pack-quantized`, `int-quantized`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..errors import ExportError
from .quantized_linears import BlockLinear, pack, unpack

ORIGINAL = "export the model before its quantization, and quantize the export with accel.quantize."
"""Advice for quantized checkpoints that `accel` does not read."""
# Positions of the values of a 32-bit word in the columns of AWQ's version `gemm`.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Block sizes of ONNX Runtime's kernel, with the preferred ones first.
_BLOCK_SIZES = (128, 64, 32, 16)
# Beginnings of the names of tensors for the quantization of activations, which is not used.
_OF_ACTIVATIONS = ("input_", "output_")

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Data types and shapes of the tensors of a layer, by the last part of their names."""


@dataclass(frozen=True, slots=True)
class PackedSettings:
    """What the quantization config of a checkpoint says about its packed weights.

    Attributes:
        method: Name of the tool.
        layout: Name of the layout: `gptq`, `awq` or `compressed-tensors`.
        zero_offset: Number to add to the stored zero points.
        group: Number of weights that share a scale; -1 for one scale per row or for all weights; `None` if layers differ.
        ordered: Whether the checkpoint contains the group of each input feature (`desc_act`).
        symmetric: Whether the zero points of compressed-tensors are the middle of the range, so that they are not stored.
        rounds_activations: Whether the model was made to run with rounded activations.
    """

    method: str
    layout: str
    zero_offset: int = 0
    group: int | None = None
    ordered: bool = False
    symmetric: bool = True
    rounds_activations: bool = False


class PackedLinear(torch.nn.Module):
    """The tensors of a quantized linear layer as the checkpoint contains them. The layer cannot run.

    Args:
        name: Name of the layer in the checkpoint.
        layer: The linear layer that it replaces.
        tensors: The data types and shapes of the tensors in the checkpoint.
        settings: The checkpoint's settings.

    Raises:
        ExportError: The tensors do not have the layout of the settings.
    """

    def __init__(self, name: str, layer: torch.nn.Linear, tensors: Shapes, settings: PackedSettings) -> None:
        super().__init__()
        self.inner, self.outer, self.settings = layer.in_features, layer.out_features, settings
        self._layout = _layout_of(tensors, settings)
        self.bits = _checked_bits(name, self.inner, self.outer, tensors, settings)
        for tensor, (dtype, shape) in tensors.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(tensor, torch.nn.Parameter(empty, requires_grad=False))
        if layer.bias is not None and "bias" not in tensors:
            self.register_parameter("bias", torch.nn.Parameter(layer.bias.detach(), requires_grad=False))
        if "weight" not in tensors:
            # Some models initialize the attribute `weight` of their layers before the checkpoint is read.
            self.weight = torch.empty(0)

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return a tensor of the layer, or `None`."""
        return self.required(name) if self._parameters.get(name) is not None else None

    def required(self, name: str) -> torch.Tensor:
        """Return a tensor that each layer of this layout has."""
        tensor: torch.Tensor = self.get_parameter(name).detach()
        return tensor

    def blocks(self) -> BlockLinear:
        """Return a layer with the same integers that can run."""
        packed, scales, zeros = self._layout.read(self)
        order = None if self._layout.order is None else self.tensor(self._layout.order)
        # compressed-tensors stores -1 if the order is not set.
        order = None if order is not None and bool((order < 0).all()) else order
        return block_linear(
            packed, scales, zeros, bits=self.bits, inner=self.inner, group=self.settings.group, bias=self.tensor("bias"),
            order=order,
        )  # fmt: skip


_Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Weights `(outer, inner * bits / 8) uint8` as `pack` packs them, scales `(outer, groups) float32`, and zero points
`(outer, groups) uint8`."""


def _words(packed: torch.Tensor) -> torch.Tensor:
    """Return words of 32 bits as bytes. The first value of a word is in its lowest bits, as in the result of `pack`."""
    return packed.contiguous().view(torch.uint8)


def _gptq(layer: PackedLinear) -> _Packed:
    """Read `qweight: (inner / 8, outer) int32`, for 4 bits, and `qzeros: (groups, outer / 8) int32`."""
    zeros = unpack(_words(layer.required("qzeros")), layer.bits, layer.outer).T
    zeros = (zeros + layer.settings.zero_offset) & (2**layer.bits - 1)
    return _words(layer.required("qweight").T), layer.required("scales").T.float(), zeros


def _awq(layer: PackedLinear) -> _Packed:
    """Read `qweight: (inner, outer / 8) int32` and `qzeros: (groups, outer / 8) int32`."""
    weights, zeros = (_awq_columns(layer.required(name), layer.outer) for name in ("qweight", "qzeros"))
    return pack(weights, 4), layer.required("scales").T.float(), zeros


def _awq_columns(words: torch.Tensor, outer: int) -> torch.Tensor:
    """Return the values `(outer, rows) uint8` of words `(rows, outer / 8) int32`, whose columns are in AWQ's order."""
    order = torch.tensor(_AWQ_ORDER).argsort()
    values = unpack(_words(words), 4, outer)
    return values.view(len(values), -1, len(order))[..., order].flatten(1).T


def _pack_quantized(layer: PackedLinear) -> _Packed:
    """Read `weight_packed: (outer, inner / 8) int32` for 4 bits, and zero points that are packed along the outer axis."""
    scales, zeros = _scales(layer), layer.tensor("weight_zero_point")
    if zeros is None:
        centers = torch.full(scales.shape, 2 ** (layer.bits - 1), dtype=torch.uint8)
    else:
        centers = unpack(_words(zeros.T), layer.bits, layer.outer).T
    return _words(layer.required("weight_packed")), scales, centers


def _int_quantized(layer: PackedLinear) -> _Packed:
    """Read `weight: (outer, inner) int8`."""
    scales, zeros = _scales(layer), layer.tensor("weight_zero_point")
    centers = torch.zeros(scales.shape, dtype=torch.int8) if zeros is None else _by_row(zeros, layer.outer)
    return unsigned(layer.required("weight"), 8), scales, unsigned(centers, 8)


def _scales(layer: PackedLinear) -> torch.Tensor:
    """Return the scales of compressed-tensors, `(outer, groups) float32`."""
    return _by_row(layer.required("weight_scale"), layer.outer).float()


def _by_row(values: torch.Tensor, outer: int) -> torch.Tensor:
    """Return `(outer, groups)` for values of that shape, for one value per row, or for one value in all."""
    return values.expand(outer, 1) if values.numel() == 1 else values.view(outer, -1)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of a quantized layer.

    Attributes:
        weights: Name of the tensor with the integers.
        scales: Name of the tensor with the scales.
        required: Names of other tensors that each layer has.
        optional: Names of tensors that a layer may have.
        order: Name of the tensor with the group of each input feature; `None` if groups consist of neighbouring features.
        read: Function that reads the tensors.
    """

    weights: str
    scales: str
    required: frozenset[str]
    optional: frozenset[str]
    order: str | None
    read: Callable[[PackedLinear], _Packed]


_COMPRESSED = frozenset({"weight_shape", "weight_zero_point", "weight_g_idx"})
_LAYOUTS = {
    "gptq": _Layout("qweight", "scales", frozenset({"qzeros"}), frozenset({"g_idx"}), "g_idx", _gptq),
    "awq": _Layout("qweight", "scales", frozenset({"qzeros"}), frozenset({"g_idx"}), None, _awq),
    "pack-quantized": _Layout(
        "weight_packed", "weight_scale", frozenset(), _COMPRESSED, "weight_g_idx", _pack_quantized
    ),
    "int-quantized": _Layout("weight", "weight_scale", frozenset(), _COMPRESSED, "weight_g_idx", _int_quantized),
}


def is_packed(tensors: Shapes) -> bool:
    """Return whether a layer has integer weights in a known layout."""
    return any(
        layout.weights in tensors and not tensors[layout.weights][0].is_floating_point for layout in _LAYOUTS.values()
    )


def _layout_of(tensors: Shapes, settings: PackedSettings) -> _Layout:
    """Return the layout of a layer with integer weights."""
    if "qweight" in tensors:
        return _LAYOUTS["awq" if settings.layout == "awq" else "gptq"]
    return _LAYOUTS["pack-quantized" if "weight_packed" in tensors else "int-quantized"]


def _checked_bits(name: str, inner: int, outer: int, tensors: Shapes, settings: PackedSettings) -> int:
    """Check the names and shapes of the tensors of a layer, and return the number of bits.

    Raises:
        ExportError: A tensor is missing, is unknown, or has another shape or data type than its layout.
    """
    layout = _layout_of(tensors, settings)
    by_column = layout.weights == "qweight"
    required = layout.required | {layout.scales}
    if settings.ordered:
        required |= {"g_idx"}
    if not by_column and not settings.symmetric:
        required |= {"weight_zero_point"}
    if missing := sorted(required - tensors.keys()):
        raise ExportError(
            f"The checkpoint lacks tensors of the quantized layer {name}: {', '.join(missing)}.",
            fix="download the missing weights, or " + ORIGINAL,
        )
    unknown = sorted(tensors.keys() - required - layout.optional - {layout.weights, "bias"})
    if unknown := [tensor for tensor in unknown if not tensor.startswith(_OF_ACTIVATIONS)]:
        raise ExportError(
            f"The quantized layer {name} has tensors that accel does not read: {', '.join(unknown)}.", fix=ORIGINAL
        )
    (dtype, shape), (scale_dtype, scale) = tensors[layout.weights], tensors[layout.scales]
    if layout.read is _int_quantized:
        bits, expected = 8, (outer, inner)
    elif layout.read is _pack_quantized:
        bits = 32 * shape[-1] // inner
        expected = (outer, inner * bits // 32)
    elif layout.read is _awq:
        bits, expected = 4, (inner, outer // 8)
    else:
        bits = 32 * shape[0] // inner
        expected = (inner * bits // 32, outer)
    groups = scale[0] if by_column else scale[1] if len(scale) == 2 else 1
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {layout.weights: (shape, expected)}
    if by_column:
        shapes |= {
            "scales": (scale, (groups, outer)),
            "qzeros": (tensors["qzeros"][1], (groups, -(-outer * bits // 32))),
        }
    elif math.prod(scale) > 1:
        shapes["weight_scale"] = scale, (outer, groups) if len(scale) == 2 else (outer,)
    if settings.group is not None and bits in (4, 8):
        size = settings.group if 0 < settings.group < inner else inner
        shapes["number of groups"] = (groups,), (-(-inner // size),)
    wrong = {tensor: pair for tensor, pair in shapes.items() if pair[0] != pair[1]}
    integers = torch.int8 if layout.read is _int_quantized else torch.int32
    if bits not in (4, 8) or wrong or dtype is not integers or not scale_dtype.is_floating_point:
        differences = "; ".join(f"{tensor} {list(a)} instead of {list(b)}" for tensor, (a, b) in wrong.items())
        raise ExportError(
            f"The tensors of the quantized layer {name} do not have the layout of {settings.method} with 4 or 8 bits: "
            f"{differences or f'{layout.weights} has the shape {list(shape)} and the data type {dtype}'}.",
            fix="use the config.json that belongs to the weights, or " + ORIGINAL,
        )
    return bits


def unsigned(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return signed integers `int8` as unsigned integers `uint8`, whose zero is the middle of the range."""
    result: torch.Tensor = (values.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    return result


def block_linear(
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    *,
    bits: int,
    inner: int,
    group: int | None = None,
    bias: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> BlockLinear:
    """Return a layer with integer weights that another tool computed.

    Args:
        packed: `(outer, inner * bits / 8) uint8`, packed as `pack` packs.
        scales: `(outer, groups) float32`.
        zeros: `(outer, groups) uint8`.
        bits: The number of bits, 4 or 8.
        inner: The number of input features.
        group: The number of weights that share a scale, if it is known.
        bias: `(outer,)`, or `None`.
        order: `(inner,)`, the group of each input feature; `None` if groups consist of neighbouring features.

    Raises:
        ExportError: The groups do not consist of a multiple of 16 features.
    """
    outer, groups = scales.shape
    if groups == 1:
        group, order = inner, None
    elif group is None or -(-inner // group) != groups:
        group = inner // groups
    features = None
    if order is not None and not torch.equal(order, torch.arange(inner, dtype=order.dtype) // group):
        features = order.argsort(stable=True)
        packed = pack(unpack(packed, bits, inner)[:, features], bits)
        if not torch.equal(order[features], torch.arange(inner, dtype=order.dtype) // group):
            group = 0
    size = next((s for s in _BLOCK_SIZES if group and group % s == 0), 32 if groups == 1 else 0)
    if not size or -(-inner // group) != groups:
        raise ExportError(
            f"The checkpoint has {groups} groups of quantized weights for {inner} input features of a layer. accel reads groups whose "
            "sizes are equal and a multiple of 16.",
            fix=ORIGINAL,
        )
    blocks = -(-inner // size)
    layer = BlockLinear(inner, outer, bits=bits, block_size=size, bias=bias is not None, order=features is not None)
    width = blocks * size * bits // 8
    layer.packed = torch.nn.functional.pad(packed, (0, width - packed.shape[1])).view(outer, blocks, -1)
    first = torch.arange(blocks) * size // group
    layer.scales, layer.zeros = scales[:, first].contiguous(), pack(zeros[:, first], bits)
    if bias is not None:
        layer.bias = bias.float()
    layer.order = features
    return layer
