"""Linear layers with integer weights, which quantizers of PyTorch models create and exporters read.

A quantizer replaces linear layers by `IntegerLinear` or `BlockLinear`. `save_quantized` writes the model with its integer weights,
without a floating-point copy. In PyTorch, the operator `accel_layers::integer_linear` rounds activations as a runtime does, and
`accel_layers::block_linear` computes with dequantized weights. Each backend converts both operators to operators of its runtime.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn import functional

from ..artifact.json_reading import build, read_json
from ..artifact.manifest import MANIFEST, Artifact, Origin, Quantization
from ..errors import ExportError, IntegrityError
from ..upstream.output_silencing import quiet
from .custom_operator_forms import leaves_nodes

OPERATOR_DOMAIN = "accel_layers"
INTEGER_LINEAR, BLOCK_LINEAR = "integer_linear", "block_linear"
WEIGHTS_FILE, LAYERS_FILE = "accel_quantized.safetensors", "accel_quantized.json"
# Endings of the names of parameters that only quantization-aware training adds to a layer.
TRAINED_STEPS = (".x_log_change", ".w_log_change")
_SCHEMA = 1
logger = logging.getLogger(__name__)
_RECORD = "accel_quantization"


@torch.library.custom_op(f"{OPERATOR_DOMAIN}::{INTEGER_LINEAR}", mutates_args=())
def _integer_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
) -> torch.Tensor:
    limits = torch.iinfo(x_zero.dtype)
    rounded = (torch.round(x / x_scale) + x_zero).clamp(limits.min, limits.max)
    return functional.linear((rounded - x_zero) * x_scale, _dequantized(weight, scale, zero))


@torch.library.custom_op(f"{OPERATOR_DOMAIN}::{BLOCK_LINEAR}", mutates_args=())
def _block_linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, inner: int = 0
) -> torch.Tensor:
    # Compiled packages from older versions of accel do not pass the argument `inner`.
    return functional.linear(x, block_weight(packed, scales, zeros, bits, inner or x.shape[-1]))


@_integer_linear.register_fake
def _(x: torch.Tensor, _x_scale: Any, _x_zero: Any, weight: torch.Tensor, _scale: Any, _zero: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@_block_linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, _scales: Any, _zeros: Any, _bits: int, _inner: int = 0) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


def _dequantized(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return (weight.float() - zero.float()[:, None]) * scale[:, None]


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack values with the given number of bits into bytes along the last axis of `values: (..., n) uint8`.

    The result is `(..., n / 2)` for 4 bits and `(..., n)` for 8 bits. With 4 bits, the first value of a pair is in the lower half of the
    byte.
    """
    if bits == 8:
        return values.contiguous()
    if values.shape[-1] % 2:
        values = functional.pad(values, (0, 1))
    return values[..., 0::2] | (values[..., 1::2] << 4)


def unpack(packed: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Unpack the result of `pack`, and return the values `(..., size) uint8`."""
    if bits == 8:
        return packed[..., :size]
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)[..., :size]


def block_weight(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, inner: int
) -> torch.Tensor:
    """Dequantize block weights to `(out_features, in_features) float32`. The arguments are the attributes of `BlockLinear`."""
    values = unpack(packed, bits, packed.shape[-1] * (8 // bits)).float()
    centers = zeros if zeros.is_floating_point() else unpack(zeros, bits, scales.shape[1]).float()
    return ((values - centers[..., None]) * scales[..., None]).flatten(1)[:, :inner]


class QuantizedLinear(torch.nn.Module):
    """Base class of linear layers with integer weights. A subclass implements the multiplication with the weights.

    Args:
        inner, outer: Number of input and output features.
        bias: Whether the layer adds a bias.
        factor: Whether inputs are multiplied by a vector first (SmoothQuant, AWQ).
        order: Whether inputs are put into another order first (GPTQ with `desc_act`).

    Attributes:
        factor: Vector that scales the inputs, `(inner,) float32`, or `None`.
        order: The order of the inputs in which neighbours share a scale, `(inner,) int64`, or `None`.
        bias: `(outer,) float32`, or `None`.
    """

    factor: torch.Tensor | None
    order: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, inner: int, outer: int, *, bias: bool, factor: bool, order: bool = False) -> None:
        super().__init__()
        self.inner, self.outer = inner, outer
        self.register_buffer("factor", torch.ones(inner) if factor else None)
        self.register_buffer("order", torch.arange(inner) if order else None)
        self.register_buffer("bias", torch.zeros(outer) if bias else None)

    def description(self) -> dict[str, Any]:
        """Return the settings from which a layer with the same class and shapes can be created."""
        return {
            "inner": self.inner,
            "outer": self.outer,
            "bias": self.bias is not None,
            "factor": self.factor is not None,
            **({} if self.order is None else {"order": True}),
        }

    def dequantized(self) -> torch.Tensor:
        """Return the dequantized weights, `(outer, inner) float32`, for inputs in the order of `order`."""
        raise NotImplementedError

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply inputs `(..., inner)` by the weights, and return `(..., outer)`."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the output `(..., outer)` of the layer for inputs `(..., inner)`."""
        x = x if self.factor is None else x * self.factor
        result = self.product(x if self.order is None else x.index_select(-1, self.order))
        return result if self.bias is None else result + self.bias


class IntegerLinear(QuantizedLinear):
    """A linear layer with 8-bit weights and 8-bit activations. The scale of the activations is fixed.

    Args:
        inner, outer: Number of input and output features.
        bias: Whether the layer adds a bias.
        factor: Whether inputs are multiplied by a vector first (SmoothQuant, AWQ).
        signed: Whether activations are `int8` instead of `uint8`.

    Attributes:
        weight: Integer weights, `(outer, inner) int8`.
        scale, zero: Scales and zero points of the weights, `(outer,)` float32 and int8.
        x_scale, x_zero: Scale and zero point of the activations, scalars.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    x_scale: torch.Tensor
    x_zero: torch.Tensor

    def __init__(
        self, inner: int, outer: int, *, signed: bool = False, bias: bool = True, factor: bool = False
    ) -> None:
        super().__init__(inner, outer, bias=bias, factor=factor)
        self.signed = signed
        self.register_buffer("weight", torch.zeros(outer, inner, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(outer))
        self.register_buffer("zero", torch.zeros(outer, dtype=torch.int8))
        self.register_buffer("x_scale", torch.ones(()))
        self.register_buffer("x_zero", torch.zeros((), dtype=torch.int8 if signed else torch.uint8))

    def description(self) -> dict[str, Any]:
        """Return the settings from which a layer with the same class and shapes can be created."""
        return {"kind": "integers", "signed": self.signed, **super().description()}

    def dequantized(self) -> torch.Tensor:
        """Return the dequantized weights, `(outer, inner) float32`."""
        return _dequantized(self.weight, self.scale, self.zero)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply inputs `(..., inner)` by the weights, with activations rounded to 8 bits."""
        inputs = (x, self.x_scale, self.x_zero, self.weight, self.scale, self.zero)
        return _applied(INTEGER_LINEAR, _integer_linear, inputs, self.outer, {})


class BlockLinear(QuantizedLinear):
    """A linear layer with 4-bit or 8-bit weights. Each block of weights along the inner axis has its own scale.

    Activations are not quantized.

    Args:
        inner, outer: Number of input and output features.
        bias: Whether the layer adds a bias.
        factor: Whether inputs are multiplied by a vector first (SmoothQuant, AWQ).
        bits: Bits of a weight, 4 or 8.
        block_size: Number of weights that share a scale.
        whole_zeros: Whether zero points are integers that are packed like the weights. If False, zero points are float32.
        order: Whether inputs are put into another order first (GPTQ with `desc_act`).

    Attributes:
        packed: Packed weights, `(outer, blocks, block_size * bits / 8) uint8`.
        scales: Scales of the blocks, `(outer, blocks) float32`.
        zeros: Zero points of the blocks, `(outer, blocks * bits / 8) uint8` or `(outer, blocks) float32`.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def __init__(
        self,
        inner: int,
        outer: int,
        *,
        bits: int,
        block_size: int,
        whole_zeros: bool = True,
        bias: bool = True,
        factor: bool = False,
        order: bool = False,
    ) -> None:
        super().__init__(inner, outer, bias=bias, factor=factor, order=order)
        self.bits, self.block_size = bits, block_size
        blocks = -(-inner // block_size)
        zeros = (
            torch.zeros(outer, -(-blocks * bits // 8), dtype=torch.uint8) if whole_zeros else torch.zeros(outer, blocks)
        )
        self.register_buffer("packed", torch.zeros(outer, blocks, block_size * bits // 8, dtype=torch.uint8))
        self.register_buffer("scales", torch.ones(outer, blocks))
        self.register_buffer("zeros", zeros)

    def description(self) -> dict[str, Any]:
        """Return the settings from which a layer with the same class and shapes can be created."""
        settings = {
            "bits": self.bits,
            "block_size": self.block_size,
            "whole_zeros": not self.zeros.is_floating_point(),
        }
        return {"kind": "blocks", **settings, **super().description()}

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor with the layer's compute dtype, for models such as T5 that cast activations to the dtype of `weight`."""
        return self.scales[:0]

    def dequantized(self) -> torch.Tensor:
        """Return the dequantized weights, `(outer, inner) float32`."""
        return block_weight(self.packed, self.scales, self.zeros, self.bits, self.inner)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply inputs `(..., inner)` by the dequantized weights."""
        inputs = (x, self.packed, self.scales, self.zeros)
        attributes = {"bits": self.bits, "block_size": self.block_size, "inner": self.inner}
        return _applied(
            BLOCK_LINEAR, lambda *inputs: _block_linear(*inputs, self.bits, self.inner), inputs, self.outer, attributes
        )


_KINDS: dict[str, Callable[..., torch.nn.Module]] = {"integers": IntegerLinear, "blocks": BlockLinear}


@runtime_checkable
class QuantizationAwareLayer(Protocol):
    """A layer during or after quantization-aware training. It can be converted to a layer with integer weights."""

    def to_integers(self) -> QuantizedLinear:
        """Return a layer with integer weights and the same results."""

    def misfit(self) -> float:
        """Return how badly the quantization steps fit the weights: the fraction of the weights' sum of squares that rounding loses.

        Return 0 if other quantization steps would not improve the result much.
        """


def _applied(
    name: str, apply: Callable[..., Any], inputs: tuple[Any, ...], outer: int, attributes: Mapping[str, int]
) -> torch.Tensor:
    """Compute the result of an operator. During a trace for ONNX, add an ONNX node for the operator instead."""
    x: torch.Tensor = inputs[0]
    if not leaves_nodes():
        result: torch.Tensor = apply(*inputs)
        return result
    node: torch.Tensor = torch.onnx.ops.symbolic(
        f"{OPERATOR_DOMAIN}::{name}",
        inputs,
        dict(attributes),
        dtype=x.dtype,
        shape=(*x.shape[:-1], outer),
        version=1,
    )
    return node


def quantized_layers(model: torch.nn.Module) -> dict[str, QuantizedLinear]:
    """Return the layers with integer weights of a model, by layer name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}


def with_record(model: torch.nn.Module, quantization: Quantization) -> torch.nn.Module:
    """Attach a quantization record to a model, and return the model. An export of the model writes the record to the manifest."""
    object.__setattr__(model, _RECORD, quantization)
    return model


def with_checkpoint_record(model: torch.nn.Module, method: str) -> torch.nn.Module:
    """Attach a record of the quantization by another tool to a model with `BlockLinear` layers, and return the model."""
    bits = min(layer.bits for layer in quantized_layers(model).values() if isinstance(layer, BlockLinear))
    return with_record(model, Quantization(scheme=f"weight-int{bits}", preset=method))


def record_of(model: torch.nn.Module) -> Quantization | None:
    """Return the record of a model's quantization, or `None` for a floating-point model."""
    records = (getattr(module, _RECORD, None) for module in model.modules())
    return next((record for record in records if record is not None), None)


def needs_float_weights(adapter: torch.nn.Module, layer: QuantizationAwareLayer) -> bool:
    """Return whether a PEFT adapter computes with the weights of its base layer, as DoRA does.

    An adapter that needs the float weights cannot be used on a layer with integer weights.

    Args:
        adapter: The adapter module, with the layer as `base_layer`. It is not modified.
        layer: The layer.
    """
    tested = copy.deepcopy(adapter).eval()
    weight: torch.Tensor = layer.weight  # type: ignore[attr-defined]
    x = torch.randn((8, weight.shape[1]), generator=torch.Generator().manual_seed(0)).to(weight.device)
    results = []
    for base_layer in (layer, layer.to_integers().to(weight.device)):
        tested.set_submodule("base_layer", base_layer)  # type: ignore[arg-type]
        try:
            with torch.no_grad():
                results.append(tested(x))
        except RuntimeError:
            # An adapter that reads `weight` of a BlockLinear fails, because this tensor is empty.
            return True
    before, after = results
    # The two layers may round some values differently, so small differences are accepted.
    return bool((after - before).abs().max() > 0.1 * before.abs().max())


def without_training(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model in which layers after quantization-aware training have integer weights.

    A model without such layers is returned unchanged.

    Raises:
        ExportError: A PEFT adapter computes with the weights of a converted layer.
    """
    # The class is checked and not the object, because a PEFT adapter also has the attributes of its base layer.
    if not any(hasattr(type(module), "to_integers") for module in model.modules()):
        return model
    record = record_of(model)
    converted = copy.deepcopy(model).eval()
    trained = [
        (name, layer)
        for name, layer in converted.named_modules(remove_duplicate=False)
        if hasattr(type(layer), "to_integers")
    ]
    for name, module in converted.named_modules():
        layer = dict(module.named_children()).get("base_layer")
        if (
            hasattr(type(layer), "to_integers")
            and isinstance(layer, QuantizationAwareLayer)
            and needs_float_weights(module, layer)
        ):
            raise ExportError(
                f"The PEFT adapter {name!r} ({type(module).__name__}) cannot be used on a quantized layer, because it computes with the "
                "layer's float weights, and quantization replaces these weights by integers.",
                fix="merge the adapter into the float model with model.merge_and_unload() and call accel.prepare_qat on the merged "
                "model, or train a plain LoRA adapter.",
            )
    misfits = {name: layer.misfit() for name, layer in trained if isinstance(layer, QuantizationAwareLayer)}
    if worst := max(misfits, key=misfits.__getitem__) if any(misfits.values()) else "":
        logger.warning(
            "%d of %d layers have quantization steps that do not fit their weights, for example because an adapter was merged after "
            "accel.prepare_qat. The worst layer is %s: rounding loses %.0f %% of the sum of squares of its weights. To compute new steps, "
            "load the weights into the float model (load_state_dict(..., strict=False)) and call accel.prepare_qat on the float model.",
            sum(map(bool, misfits.values())), len(misfits), worst, 100 * misfits[worst],
        )  # fmt: skip
    integers: dict[int, torch.nn.Module] = {}
    for name, layer in trained:
        assert isinstance(layer, QuantizationAwareLayer)
        # Convert a layer that the model contains under several names only once, so that the names still share one layer.
        if id(layer) not in integers:
            integers[id(layer)] = layer.to_integers()
        converted.set_submodule(name, integers[id(layer)])
    return converted if record is None else with_record(converted, record)


def save_quantized(model: torch.nn.Module, folder: Path) -> tuple[str, ...]:
    """Write the weights of a model with quantized layers, and its configs. Return the names of the weight files.

    Raises:
        ExportError: The model has PEFT adapters, which its config does not describe.
    """
    from safetensors.torch import save_model

    if getattr(model, "peft_config", None) is not None:
        raise ExportError(
            f"A {type(model).__name__} that has PEFT adapters and quantized layers cannot be written in the PyTorch format.",
            fix="export the model with format='onnx' or format='openvino_ir', or merge the adapters first with "
            "model.merge_and_unload().",
        )

    # The file has another name than the weight files of transformers, because `from_pretrained` of transformers cannot read these weights
    # and would create random weights.
    save_model(model, str(folder / WEIGHTS_FILE))
    _save_configs(model, folder)
    record = record_of(model)
    values = {
        "schema": _SCHEMA,
        "layers": _descriptions(model),
        "quantization": None if record is None else asdict(record),
    }
    (folder / LAYERS_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return (WEIGHTS_FILE, LAYERS_FILE)


def _descriptions(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Return the descriptions of all quantized layers, by layer name.

    If a model contains one layer under several names, the later names refer to the first name.
    """
    firsts: dict[torch.nn.Module, str] = {}
    descriptions: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedLinear):
            first = firsts.setdefault(module, name)
            descriptions[name] = module.description() if first == name else {"same": first}
    return descriptions


def _save_configs(model: Any, folder: Path) -> None:
    """Write config.json (with the name of the model's class) and the generation config, as `save_pretrained` does."""
    config = copy.deepcopy(getattr(model, "config", None))
    if config is None:
        return
    config.architectures = [type(model).__name__]
    with quiet():
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(folder)


def holds_quantized(folder: Path) -> bool:
    """Return whether a folder contains a model that `save_quantized` wrote."""
    return (folder / LAYERS_FILE).is_file()


def origin_of(folder: Path) -> Origin | None:
    """Return the origin of a quantized model from the manifest in the folder. Return `None` if the folder has no quantized model."""
    if not holds_quantized(folder) or not (folder / MANIFEST).is_file():
        return None
    return Artifact.load(folder).manifest.source


def load_quantized(folder: Path, make: Callable[..., torch.nn.Module]) -> torch.nn.Module:
    """Load a model that `save_quantized` wrote.

    Args:
        folder: Folder with the model.
        make: Function that creates the model without weights. It is called with `add_pooling_layer=False` if the weight file contains
            no pooler.

    Raises:
        IntegrityError: The files do not match the model.
        ExportError: A newer version of accel wrote the files.
    """
    from safetensors import safe_open
    from safetensors.torch import load_model

    values = read_json(folder / LAYERS_FILE)
    if values.get("schema") != _SCHEMA:
        raise ExportError(
            f"{folder / LAYERS_FILE} has the schema version {values.get('schema')!r}; this version of accel reads only {_SCHEMA}.",
            fix="update accel-transformers (pip install -U accel-transformers), or quantize the model again.",
        )
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        names = set(file.keys())
    model = make()
    pooler = {name for name in model.state_dict() if "pooler" in name.split(".")}
    if pooler and not pooler & names:
        model = make(add_pooling_layer=False)
    try:
        for name, description in values["layers"].items():
            settings = dict(description)
            first = settings.get("same")
            layer = model.get_submodule(first) if first is not None else _KINDS[settings.pop("kind")](**settings)
            model.set_submodule(name, layer)
        missing, unexpected = load_model(model, str(folder / WEIGHTS_FILE), strict=False)
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise IntegrityError(
            f"The quantized model in {folder} does not match its config.json: {error}", fix="quantize the model again."
        ) from error
    if missing or unexpected:
        listing = ", ".join(sorted((*missing, *unexpected))[:3])
        raise IntegrityError(
            f"{folder / WEIGHTS_FILE} does not match the config.json in the same folder: {len(missing)} weights are missing and "
            f"{len(unexpected)} are unexpected ({listing}).",
            fix="quantize the model again.",
        )
    record = values.get("quantization")
    return model if record is None else with_record(model, build(Quantization, record, str(folder / LAYERS_FILE)))
