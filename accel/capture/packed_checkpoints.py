"""Load checkpoints whose linear layers other tools quantized: GPTQ, AWQ, auto-round, compressed-tensors and torchao.

The layers become `BlockLinear` layers with the integers, scales and zero points of the checkpoint. No packages of these tools are needed,
except torchao for its own checkpoints. The layouts of the packed weights are described in the documentation of AutoGPTQ (`qweight`,
`qzeros`, `scales`, `g_idx`), AutoAWQ (version `gemm`) and compressed-tensors (`pack-quantized`, `int-quantized`).
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
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

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Data types and shapes of the tensors of a layer, by the last part of their names."""


class _PackedLinear(torch.nn.Module):
    """The tensors of a quantized linear layer as the checkpoint contains them. The layer cannot run.

    Args:
        layer: The linear layer that it replaces.
        tensors: The data types and shapes of the tensors in the checkpoint.
        settings: The checkpoint's quantization config.
    """

    def __init__(self, layer: torch.nn.Linear, tensors: Shapes, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.inner, self.outer, self.settings = layer.in_features, layer.out_features, settings
        for name, (dtype, shape) in tensors.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))
        if layer.bias is not None and "bias" not in tensors:
            self.register_parameter("bias", torch.nn.Parameter(layer.bias.detach(), requires_grad=False))

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return a tensor of the layer, or `None`."""
        return self.required(name) if self._parameters.get(name) is not None else None

    def required(self, name: str) -> torch.Tensor:
        """Return a tensor that each layer of this layout has."""
        tensor: torch.Tensor = self.get_parameter(name).detach()
        return tensor

    def blocks(self) -> BlockLinear:
        """Return a layer with the same integers that can run."""
        layout = next(layout for key, layout in _LAYOUTS.items() if self.tensor(key) is not None)
        packed, scales, zeros, order, bits = layout(self)
        return block_linear(
            packed, scales, zeros, bits=bits, inner=self.inner, group=self.settings.get("group_size"),
            bias=self.tensor("bias"), order=order,
        )  # fmt: skip


_Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, int]
"""Weights `(outer, inner * bits / 8) uint8` as `pack` packs them, scales `(outer, groups) float32`, zero points
`(outer, groups) uint8`, the group of each column of the weight or `None`, and the number of bits."""


def _words(packed: torch.Tensor) -> torch.Tensor:
    """Return words of 32 bits as bytes. The first value of a word is in its lowest bits, as in the result of `pack`."""
    return packed.contiguous().view(torch.uint8)


def _gptq(layer: _PackedLinear) -> _Packed:
    """Read `qweight: (inner / 8, outer) int32`, for 4 bits, and `qzeros: (groups, outer / 8) int32`; or the layout of AWQ."""
    qweight, qzeros, scales = (layer.required(name) for name in ("qweight", "qzeros", "scales"))
    if str(layer.settings.get("quant_method")) == "awq" or "awq" in str(layer.settings.get("packing_format")):
        return _awq(layer)
    bits = 32 * qweight.shape[0] // layer.inner
    zeros = unpack(_words(qzeros), bits, layer.outer).T
    if layer.settings.get("checkpoint_format", "gptq") != "gptq_v2":
        # This format contains each zero point minus 1.
        zeros = (zeros + 1) & (2**bits - 1)
    return _words(qweight.T), scales.T.float(), zeros, layer.tensor("g_idx"), bits


def _awq(layer: _PackedLinear) -> _Packed:
    """Read `qweight: (inner, outer / 8) int32` and `qzeros: (groups, outer / 8) int32`, whose columns are in another order."""
    order = torch.tensor(_AWQ_ORDER).argsort()

    def columns(words: torch.Tensor) -> torch.Tensor:
        values = unpack(_words(words), 4, layer.outer)
        return values.view(len(values), -1, len(order))[..., order].flatten(1).T

    qweight, qzeros, scales = (layer.required(name) for name in ("qweight", "qzeros", "scales"))
    return pack(columns(qweight), 4), scales.T.float(), columns(qzeros), None, 4


def _pack_quantized(layer: _PackedLinear) -> _Packed:
    """Read `weight_packed: (outer, inner / 8) int32` for 4 bits, and zero points that are packed along the outer axis."""
    weight, scales = layer.required("weight_packed"), layer.required("weight_scale")
    zeros = layer.tensor("weight_zero_point")
    bits = 32 * weight.shape[1] // layer.inner
    middle = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.uint8)
    packed_zeros = middle if zeros is None else unpack(_words(zeros.T), bits, layer.outer).T
    return _words(weight), scales.float(), packed_zeros, layer.tensor("weight_g_idx"), bits


def _int_quantized(layer: _PackedLinear) -> _Packed:
    """Read `weight: (outer, inner) int8`."""
    weight, scales = layer.required("weight"), layer.required("weight_scale")
    zeros = layer.tensor("weight_zero_point")
    scales = scales.float().view(layer.outer, -1) if scales.numel() > 1 else scales.float().expand(layer.outer, 1)
    centers = torch.zeros(scales.shape, dtype=torch.int8) if zeros is None else zeros.expand(scales.shape)
    return _unsigned(weight, 8), scales, _unsigned(centers, 8), layer.tensor("weight_g_idx"), 8


_LAYOUTS: Mapping[str, Callable[[_PackedLinear], _Packed]] = {
    "qweight": _gptq,
    "weight_packed": _pack_quantized,
    "weight": _int_quantized,
}
"""Functions that read a layout, by the name of the tensor with the weights."""


_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "qweight": ("qzeros", "scales"),
    "weight_packed": ("weight_scale",),
    "weight": ("weight_scale",),
}
"""Names of the tensors that belong to the tensor with the weights."""


def _weights_name(tensors: Shapes) -> str | None:
    """Return the name of the tensor with the integer weights of a layer, or `None` if the layer has none."""
    names = [name for name in _LAYOUTS if name in tensors and not tensors[name][0].is_floating_point]
    return names[0] if names else None


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


def packed_settings(config: Any) -> dict[str, Any] | None:
    """Return the quantization config of a model whose packed weights accel reads; `None` for other models.

    Args:
        config: The config of a transformers model.

    Raises:
        ExportError: The checkpoint was quantized by GPTQ, AWQ or auto-round, in a layout or with a number of bits that accel does not read.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    settings = dict(settings if isinstance(settings, dict) else settings.to_dict())
    method = str(settings.get("quant_method", "")).replace("_", "-")
    if method == "compressed-tensors":
        return settings if _formats(settings) <= {"pack-quantized", "int-quantized"} else None
    layouts = {
        "gptq": settings.get("checkpoint_format", "gptq"),
        "awq": settings.get("version", "gemm"),
        "auto-round": str(settings.get("packing_format", "auto_round:auto_gptq")).rpartition(":")[2],
    }
    if method not in layouts:
        return None
    layout, bits = str(layouts[method]).lower(), settings.get("bits", 4)
    if layout not in ("gptq", "gptq_v2", "gemm", "auto_gptq", "auto_awq") or bits not in (4, 8):
        raise ExportError(
            f"The checkpoint was quantized by {method} to {bits} bits, in the layout {layout!r}. accel reads 4 and 8 bits in the "
            "layouts of AutoGPTQ and of AutoAWQ's version 'gemm'.",
            fix=_ORIGINAL,
        )
    if settings.get("dynamic") or settings.get("extra_config"):
        # Single layers may have other settings; the shapes of their tensors show the number of bits.
        logger.info("The checkpoint quantizes some layers with other settings")
    return settings


def _formats(settings: Mapping[str, Any]) -> set[str]:
    groups: Mapping[str, Any] = settings.get("config_groups") or {}
    formats = {str(group.get("format") or settings.get("format")) for group in groups.values()}
    return formats or {str(settings.get("format"))}


def load_packed(
    load: Callable[..., torch.nn.Module], folder: Path, model_config: Any, settings: dict[str, Any]
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
        ExportError: The weights are not in safetensors files, or quantized layers are not linear layers of the model.
    """
    files = safetensors_files(folder)
    if not files:
        raise ExportError(
            f"accel reads quantized checkpoints only from safetensors files, and {folder} has none.",
            fix="save the model again with safetensors files, or " + _ORIGINAL,
        )
    layers: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for path in files:
        for name, (kind, shape, _) in safetensors_header(path).items():
            owner, _, last = name.rpartition(".")
            if kind in _DTYPES:
                layers.setdefault(owner, {})[last] = _DTYPES[kind], shape
    packed = {name: tensors for name, tensors in layers.items() if _weights_name(tensors) is not None}
    absent = [
        f"{name}.{tensor}"
        for name, tensors in packed.items()
        for tensor in _REQUIRED[str(_weights_name(tensors))]
        if tensor not in tensors
    ]
    if absent:
        raise ExportError(
            f"The checkpoint in {folder} lacks {len(absent)} tensors of quantized layers: {', '.join(absent[:3])}.",
            fix="download the missing weights, or " + _ORIGINAL,
        )
    if any(
        group.get("input_activations")
        for group in (settings.get("config_groups") or {}).values()
        if isinstance(group, dict)
    ):
        logger.warning(
            "The checkpoint in %s was made to run with rounded activations. accel uses its integer weights and does not round activations.",
            folder,
        )
    plain = copy.deepcopy(model_config)
    _register_loader()
    plain.quantization_config = {"quant_method": _METHOD, "packed": packed, "settings": settings}
    model = load(config=plain)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "quantization_config"):
            del module.config.quantization_config  # type: ignore[union-attr]
    return _recorded(model, str(settings["quant_method"]))


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
        def __init__(self, quant_method: str, packed: Mapping[str, Shapes], settings: Mapping[str, Any]) -> None:
            self.quant_method = quant_method
            self.packed, self.settings = packed, settings

    @register_quantizer(_METHOD)
    class PackedLoader(HfQuantizer):  # type: ignore[misc]
        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            config = self.quantization_config
            matched = dict(_matched(model, config.packed))
            _check_matched(model, config.packed, {path for path, _ in matched.values()})
            for name, (_, tensors) in matched.items():
                layer = model.get_submodule(name)
                model.set_submodule(name, _PackedLinear(layer, tensors, config.settings))

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


def _check_matched(model: torch.nn.Module, packed: Mapping[str, Shapes], matched: Collection[str]) -> None:
    """Raise if quantized layers of the checkpoint are not linear layers of the model. A head that the model does not have is ignored.

    Raises:
        ExportError: The model has no quantized layer, or its experts are quantized. transformers merges the experts of a layer.
    """
    others = [name for name in packed if name not in matched and (not matched or ".experts." in name)]
    if others:
        raise ExportError(
            f"{len(others)} of {len(packed)} quantized layers of the checkpoint are not linear layers of a {type(model).__name__} in "
            f"transformers: {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}.",
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
            setattr(module, last, torch.nn.Parameter(weight.dequantize().float(), requires_grad=False))
    if others:
        logger.warning(
            "%d weights that torchao quantized are exported in float32, because their format (%s) has no integers in blocks: %s",
            len(others), type(quantized[others[0]]).__name__, ", ".join(others[:3]),
        )  # fmt: skip
    return _recorded(converted, "torchao") if blocks else converted


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
