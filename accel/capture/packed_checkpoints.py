"""Load checkpoints whose linear layers other tools quantized: GPTQ, AWQ, auto-round, compressed-tensors and torchao.

The layers become `BlockLinear` layers with the integers, scales and zero points of the checkpoint. No packages of these tools are needed,
except torchao for its own checkpoints. The layouts of the packed weights are described in the documentation of AutoGPTQ (`qweight`,
`qzeros`, `scales`, `g_idx`), AutoAWQ (version `gemm`) and compressed-tensors (`pack-quantized`, `int-quantized`).
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..artifact.manifest import Quantization
from ..errors import ExportError
from .quantized_linears import BlockLinear, pack, quantized_layers, unpack, with_record
from .streamed_weights import safetensors_files, safetensors_header

logger = logging.getLogger(__name__)

_METHOD = "accel-packed"
"""Name under which the loader is registered in transformers."""
_ORIGINAL = "export the model before its quantization, and quantize the export with accel.quantize."
# Positions of the values of a 32-bit word in the columns of AWQ's version `gemm`.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Block sizes of ONNX Runtime's kernel, with the preferred ones first.
_BLOCK_SIZES = (128, 64, 32, 16)
_DTYPES = {
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
_OUTPUT_LAYERS = ("lm_head", "embed_out", "cls.predictions.decoder")

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


class _PackedLinear(torch.nn.Module):
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
        self.bits = _checked_bits(name, self.inner, self.outer, tensors, settings)
        self.packed_name = _weights_name(tensors)
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
        packed, scales, zeros, order = _READERS[str(self.packed_name)](self)
        # compressed-tensors stores -1 if the order is not set.
        order = None if order is not None and bool((order < 0).all()) else order
        return block_linear(
            packed, scales, zeros, bits=self.bits, inner=self.inner, group=self.settings.group, bias=self.tensor("bias"),
            order=order,
        )  # fmt: skip


_Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Weights `(outer, inner * bits / 8) uint8` as `pack` packs them, scales `(outer, groups) float32`, zero points
`(outer, groups) uint8`, and the group of each column of the weight or `None`."""


def _words(packed: torch.Tensor) -> torch.Tensor:
    """Return words of 32 bits as bytes. The first value of a word is in its lowest bits, as in the result of `pack`."""
    return packed.contiguous().view(torch.uint8)


def _gptq(layer: _PackedLinear) -> _Packed:
    """Read `qweight: (inner / 8, outer) int32`, for 4 bits, and `qzeros: (groups, outer / 8) int32`; or the layout of AWQ."""
    qweight, qzeros, scales = (layer.required(name) for name in ("qweight", "qzeros", "scales"))
    if layer.settings.layout == "awq":
        return pack(_awq_columns(qweight, layer.outer), 4), scales.T.float(), _awq_columns(qzeros, layer.outer), None
    zeros = unpack(_words(qzeros), layer.bits, layer.outer).T
    zeros = (zeros + layer.settings.zero_offset) & (2**layer.bits - 1)
    return _words(qweight.T), scales.T.float(), zeros, layer.tensor("g_idx")


def _awq_columns(words: torch.Tensor, outer: int) -> torch.Tensor:
    """Return the values `(outer, rows) uint8` of words `(rows, outer / 8) int32`, whose columns are in AWQ's order."""
    order = torch.tensor(_AWQ_ORDER).argsort()
    values = unpack(_words(words), 4, outer)
    return values.view(len(values), -1, len(order))[..., order].flatten(1).T


def _pack_quantized(layer: _PackedLinear) -> _Packed:
    """Read `weight_packed: (outer, inner / 8) int32` for 4 bits, and zero points that are packed along the outer axis."""
    scales, zeros = _scales(layer), layer.tensor("weight_zero_point")
    if zeros is None:
        centers = torch.full(scales.shape, 2 ** (layer.bits - 1), dtype=torch.uint8)
    else:
        centers = unpack(_words(zeros.T), layer.bits, layer.outer).T
    return _words(layer.required("weight_packed")), scales, centers, layer.tensor("weight_g_idx")


def _int_quantized(layer: _PackedLinear) -> _Packed:
    """Read `weight: (outer, inner) int8`."""
    scales, zeros = _scales(layer), layer.tensor("weight_zero_point")
    centers = torch.zeros(scales.shape, dtype=torch.int8) if zeros is None else _by_row(zeros, layer.outer)
    return _unsigned(layer.required("weight"), 8), scales, _unsigned(centers, 8), layer.tensor("weight_g_idx")


def _scales(layer: _PackedLinear) -> torch.Tensor:
    """Return the scales of compressed-tensors, `(outer, groups) float32`."""
    return _by_row(layer.required("weight_scale"), layer.outer).float()


def _by_row(values: torch.Tensor, outer: int) -> torch.Tensor:
    """Return `(outer, groups)` for values of that shape, for one value per row, or for one value in all."""
    return values.expand(outer, 1) if values.numel() == 1 else values.view(outer, -1)


_READERS: Mapping[str, Callable[[_PackedLinear], _Packed]] = {
    "qweight": _gptq,
    "weight_packed": _pack_quantized,
    "weight": _int_quantized,
}
"""Functions that read the tensors of a layer, by the name of the tensor with the weights."""

_TENSORS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "qweight": (frozenset({"qzeros", "scales"}), frozenset({"g_idx"})),
    "weight_packed": (frozenset({"weight_scale"}), frozenset({"weight_shape", "weight_zero_point", "weight_g_idx"})),
    "weight": (frozenset({"weight_scale"}), frozenset({"weight_shape", "weight_zero_point", "weight_g_idx"})),
}
"""Names of the tensors that belong to the tensor with the weights: those that must exist, and those that may."""
_OF_ACTIVATIONS = ("input_", "output_")


def _weights_name(tensors: Shapes) -> str | None:
    """Return the name of the tensor with the integer weights of a layer, or `None` if the layer has none."""
    names = [name for name in _READERS if name in tensors and not tensors[name][0].is_floating_point]
    return names[0] if names else None


def _checked_bits(name: str, inner: int, outer: int, tensors: Shapes, settings: PackedSettings) -> int:
    """Check the names and shapes of the tensors of a layer, and return the number of bits.

    Raises:
        ExportError: A tensor is missing, is unknown, or has another shape or data type than its layout.
    """
    weights = str(_weights_name(tensors))
    required, optional = _TENSORS[weights]
    if settings.ordered:
        required |= {"g_idx"}
    if weights != "qweight" and not settings.symmetric:
        required |= {"weight_zero_point"}
    if missing := sorted(required - tensors.keys()):
        raise ExportError(
            f"The checkpoint lacks tensors of the quantized layer {name}: {', '.join(missing)}.",
            fix="download the missing weights, or " + _ORIGINAL,
        )
    unknown = sorted(tensors.keys() - required - optional - {weights, "bias"})
    if unknown := [tensor for tensor in unknown if not tensor.startswith(_OF_ACTIVATIONS)]:
        raise ExportError(
            f"The quantized layer {name} has tensors that accel does not read: {', '.join(unknown)}.", fix=_ORIGINAL
        )
    dtype, shape = tensors[weights]
    scale = tensors["scales" if weights == "qweight" else "weight_scale"][1]
    if weights == "weight":
        bits, expected = 8, (outer, inner)
    elif weights == "weight_packed":
        bits = 32 * shape[-1] // inner
        expected = (outer, inner * bits // 32)
    elif settings.layout == "awq":
        bits, expected = 4, (inner, outer // 8)
    else:
        bits = 32 * shape[0] // inner
        expected = (inner * bits // 32, outer)
    groups = scale[0] if weights == "qweight" else scale[1] if len(scale) == 2 else 1
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {weights: (shape, expected)}
    if weights == "qweight":
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
    integers = torch.int8 if weights == "weight" else torch.int32
    floats = tensors["scales" if weights == "qweight" else "weight_scale"][0].is_floating_point
    if bits not in (4, 8) or wrong or dtype is not integers or not floats:
        differences = "; ".join(f"{tensor} {list(a)} instead of {list(b)}" for tensor, (a, b) in wrong.items())
        raise ExportError(
            f"The tensors of the quantized layer {name} do not have the layout of {settings.method} with 4 or 8 bits: "
            f"{differences or f'{weights} has the shape {list(shape)} and the data type {dtype}'}.",
            fix="use the config.json that belongs to the weights, or " + _ORIGINAL,
        )
    return bits


def _unsigned(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return signed integers `int8` as unsigned integers `uint8`, whose zero is the middle of the range."""
    unsigned: torch.Tensor = (values.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    return unsigned


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
            fix=_ORIGINAL,
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


def packed_settings(config: Any) -> PackedSettings | None:
    """Return the settings of a model whose packed weights accel reads; `None` for other models.

    Args:
        config: The config of a transformers model.

    Raises:
        ExportError: The quantization config is not valid, or describes a layout or a number of bits that accel does not read.
    """
    values: Any = getattr(config, "quantization_config", None)
    values = values.to_dict() if hasattr(values, "to_dict") else values
    if values is None:
        return None
    try:
        method = str(values.get("quant_method", "")).replace("_", "-")
        if method == "compressed-tensors":
            return _compressed_settings(values)
        return _gptq_settings(method, values) if method in ("gptq", "awq", "auto-round") else None
    except (AttributeError, TypeError, ValueError) as error:
        raise ExportError(
            f"The entry quantization_config in config.json cannot be read: {error}",
            fix="correct config.json, or download it again.",
        ) from error


def _gptq_settings(method: str, values: Mapping[str, Any]) -> PackedSettings:
    """Return the settings of GPTQ, AWQ and auto-round."""
    if method == "gptq":
        layout = values.get("checkpoint_format") or values.get("format") or "gptq"
    elif method == "awq":
        layout = values.get("version") or values.get("format") or "gemm"
    else:
        layout = str(values.get("packing_format") or "auto_round:auto_gptq").rpartition(":")[2]
    layout, bits = str(layout).lower(), int(values.get("bits") or 4)
    awq = layout in ("gemm", "auto_awq")
    if (layout not in ("gptq", "gptq_v2", "auto_gptq") and not awq) or bits not in ((4,) if awq else (4, 8)):
        raise ExportError(
            f"The checkpoint was quantized by {method} to {bits} bits, in the layout {layout!r}. accel reads 4 and 8 bits in the "
            "layouts of AutoGPTQ, and 4 bits in AutoAWQ's version 'gemm'.",
            fix=_ORIGINAL,
        )
    # Single layers may have other settings. The shapes of their tensors show the number of bits.
    varies = bool(values.get("dynamic") or values.get("extra_config"))
    size = values.get("group_size")
    return PackedSettings(
        method=method,
        layout="awq" if awq else "gptq",
        # Other versions contain each zero point minus 1.
        zero_offset=0 if awq or layout == "gptq_v2" else 1,
        group=None if varies or size is None else int(size),
        ordered=bool(values.get("desc_act")) and not varies and not awq,
    )


def _compressed_settings(values: Mapping[str, Any]) -> PackedSettings | None:
    """Return the settings of compressed-tensors; `None` if transformers loads the format, or for formats without integers."""
    groups = list((values.get("config_groups") or {}).values())
    formats = {str(group.get("format") or values.get("format")) for group in groups} or {str(values.get("format"))}
    if not formats <= {"pack-quantized", "int-quantized"}:
        return None
    weights = [group.get("weights") or {} for group in groups]
    strategies = {str(each.get("strategy") or "tensor") for each in weights}
    if values.get("transform_config") or not strategies <= {"channel", "group", "tensor"}:
        raise ExportError(
            "The checkpoint was quantized by compressed-tensors with "
            f"{'rotations (transform_config)' if values.get('transform_config') else f'the strategy {sorted(strategies)}'}, which accel "
            "does not read.",
            fix=_ORIGINAL,
        )
    sizes = {int(each.get("group_size") or -1) for each in weights}
    return PackedSettings(
        method="compressed-tensors",
        layout="compressed-tensors",
        group=sizes.pop() if len(sizes) == 1 else None,
        symmetric=len(weights) != 1 or bool(weights[0].get("symmetric", True)),
        rounds_activations=any(group.get("input_activations") for group in groups),
    )


def load_packed(
    load: Callable[..., torch.nn.Module], folder: Path, model_config: Any, settings: PackedSettings
) -> torch.nn.Module:
    """Load a model whose linear layers are quantized.

    Args:
        load: A function that loads the model with `from_pretrained` and passes its keyword arguments on.
        folder: The folder with the checkpoint, in safetensors files.
        model_config: The config of the model.
        settings: The result of `packed_settings`.

    Returns:
        The model, with a record of its quantization.

    Raises:
        ExportError: Weight files or tensors are missing, quantized layers are not linear layers of the model, or their tensors do not have
            the layout of the settings.
        SafetensorError: A weight file is damaged.
        FileNotFoundError: The index of the weights lists a file that is missing.
    """
    from safetensors import safe_open

    files = safetensors_files(folder)
    if not files and (folder / "model.safetensors.index.json").is_file():
        raise FileNotFoundError("weight files are missing")
    if not files:
        raise ExportError(
            "accel reads quantized checkpoints from model.safetensors or from the files that model.safetensors.index.json lists, and "
            f"{folder} has neither.",
            fix="rename the file with the weights to model.safetensors, or save the model again with safetensors files.",
        )
    layers: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for path in files:
        with safe_open(path, framework="pt"):
            header = safetensors_header(path)
        for name, (kind, shape, _) in header.items():
            owner, _, last = name.rpartition(".")
            layers.setdefault(owner, {})[last] = _DTYPES.get(kind, torch.uint8), shape
    packed = {name: tensors for name, tensors in layers.items() if _weights_name(tensors) is not None}
    if not packed:
        raise ExportError(
            f"config.json says that {settings.method} quantized the checkpoint, but its weights in {folder} are not quantized.",
            fix="use the weights that belong to config.json, or remove quantization_config from config.json.",
        )
    inside = [
        name for name in layers if any(name.startswith(f"{layer}.") for layer in _prefixes(name) if layer in packed)
    ]
    if inside:
        raise ExportError(
            f"Quantized layers of the checkpoint have tensors that accel does not read: {', '.join(inside[:3])}.",
            fix=_ORIGINAL,
        )
    if settings.rounds_activations:
        logger.warning(
            "The checkpoint in %s was made to run with rounded activations. accel uses its integer weights and does not round activations.",
            folder,
        )
    plain = copy.deepcopy(model_config)
    _register_loader()
    plain.quantization_config = {"quant_method": _METHOD, "packed": packed, "settings": settings}
    if any(name in packed for name in _OUTPUT_LAYERS):
        # The quantized output layer is not the table of the embeddings.
        plain.get_text_config().tie_word_embeddings = plain.tie_word_embeddings = False
    model = load(config=plain)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "quantization_config"):
            del module.config.quantization_config  # type: ignore[union-attr]
    return _recorded(model, settings.method)


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules around a module."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _recorded(model: torch.nn.Module, method: str) -> torch.nn.Module:
    bits = min(layer.bits for layer in quantized_layers(model).values() if isinstance(layer, BlockLinear))
    return with_record(model, Quantization(scheme=f"weight-int{bits}", preset=method))


@functools.cache
def _register_loader() -> None:
    """Register a loader of packed weights in transformers.

    transformers creates the model without weights, lets the loader replace layers, and reads the weights.
    """
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(_METHOD)
    class PackedConfig(QuantizationConfigMixin):  # type: ignore[misc]
        def __init__(self, quant_method: str, packed: Mapping[str, Shapes], settings: PackedSettings) -> None:
            self.quant_method = quant_method
            self.packed, self.settings = packed, settings

    @register_quantizer(_METHOD)
    class PackedLoader(HfQuantizer):  # type: ignore[misc]
        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            config = self.quantization_config
            matched = dict(_matched(model, config.packed))
            _check_matched(model, config.packed, {path for path, _ in matched.values()})
            for name, (path, tensors) in matched.items():
                layer = model.get_submodule(name)
                model.set_submodule(name, _PackedLinear(path, layer, tensors, config.settings))

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            for name, layer in list(model.named_modules()):
                if isinstance(layer, _PackedLinear):
                    model.set_submodule(name, layer.blocks())
            del model.hf_quantizer, model.is_quantized, model.quantization_method
            return model

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False


def _matched(model: Any, packed: Mapping[str, Shapes]) -> Iterator[tuple[str, tuple[str, Shapes]]]:
    """Yield the names of the linear layers of a model that are packed in the checkpoint, with their names in the checkpoint and the shapes
    of their tensors.

    A checkpoint of a model with a head has a prefix before the names of the model without the head, and the reverse.
    """
    prefix = f"{model.base_model_prefix}."
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            names = (name, prefix + name, name.removeprefix(prefix))
            path = next((each for each in names if each in packed), None)
            if path is not None:
                yield name, (path, packed[path])


def _check_matched(model: Any, packed: Mapping[str, Shapes], matched: Set[str]) -> None:
    """Raise if quantized layers of the checkpoint are not linear layers of the model. A head that the model does not have is ignored.

    Raises:
        ExportError: The model has no quantized layer, or quantized embeddings or experts (transformers merges the experts of a layer).
    """
    prefix = f"{model.base_model_prefix}."
    modules = {name for name, _ in model.named_modules()}
    modules |= {prefix + name for name in modules} | {name.removeprefix(prefix) for name in modules}
    others = [name for name in packed.keys() - matched if not matched or name in modules or ".experts." in name]
    if others:
        raise ExportError(
            f"{len(others)} of {len(packed)} quantized layers of the checkpoint are not linear layers of a {type(model).__name__} in "
            f"transformers: {', '.join(sorted(others)[:3])}{', ...' if len(others) > 3 else ''}.",
            fix=_ORIGINAL,
        )


def without_torchao(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model in which layers whose weights torchao quantized are `BlockLinear` layers with the same integers.

    Weights of other formats of torchao, for example float8, are dequantized. A model without weights of torchao is returned unchanged.
    """
    quantized = {name: p for name, p in model.named_parameters(remove_duplicate=False) if _is_torchao(p)}
    if not quantized:
        return model
    tensors = (*model.parameters(), *model.buffers())
    converted = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    blocks: dict[int, torch.nn.Module] = {}
    others = []
    for name, weight in quantized.items():
        owner, _, last = name.rpartition(".")
        module = converted.get_submodule(owner)
        layer = blocks.get(id(module)) or _torchao_blocks(module, weight)
        if layer is not None:
            blocks[id(module)] = layer
            converted.set_submodule(owner, layer)
        else:
            others.append(name)
            setattr(module, last, torch.nn.Parameter(_dequantized(name, weight), requires_grad=False))
    if others:
        logger.warning(
            "%d weights that torchao quantized are exported in float32, because their format (%s) has no integers in blocks: %s",
            len(others), type(quantized[others[0]]).__name__, ", ".join(others[:3]),
        )  # fmt: skip
    return _recorded(converted, "torchao") if blocks else converted


def _dequantized(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight of torchao in float32.

    Raises:
        ExportError: torchao cannot dequantize this format.
    """
    try:
        values: torch.Tensor = weight.dequantize().float()
    except NotImplementedError as error:
        raise ExportError(
            f"The weight {name} has a format of torchao ({type(weight.data).__name__}) that torchao cannot dequantize.",
            fix=_ORIGINAL,
        ) from error
    return values


def _is_torchao(tensor: torch.Tensor) -> bool:
    return type(tensor.data).__module__.startswith("torchao.")


def _torchao_blocks(module: torch.nn.Module, weight: torch.Tensor) -> BlockLinear | None:
    """Return a layer with the integers of a weight of torchao, or `None` if it has other values than integers in blocks."""
    tensor: Any = weight.data
    integers, sizes = getattr(tensor, "qdata", None), list(getattr(tensor, "block_size", ()))
    if not isinstance(module, torch.nn.Linear) or integers is None or integers.dtype is not torch.int8:
        return None
    # The other sizes are those of weights whose blocks have several rows.
    if integers.shape != weight.shape or sizes[:-1] != [1]:
        return None
    if getattr(tensor, "act_pre_scale", None) is not None:
        return None
    bits = 4 if str(getattr(tensor, "target_dtype", "")).removeprefix("torch.int") in ("1", "2", "3", "4") else 8
    scales = tensor.scale.float().view(len(integers), -1)
    zeros = getattr(tensor, "zero_point", None)
    zeros = torch.zeros(scales.shape, dtype=torch.int8) if zeros is None else zeros.view(scales.shape)
    if zeros.is_floating_point():
        return None
    return block_linear(
        pack(_unsigned(integers, bits), bits), scales, _unsigned(zeros, bits), bits=bits, inner=integers.shape[1],
        group=int(sizes[-1]), bias=None if module.bias is None else module.bias.detach(),
    )  # fmt: skip
