"""Quantization-aware training: linear layers simulate rounding during training and become integer layers at export.

PyTorch operators compute the rounding and its gradients. The scales of the rounding are trained (Esser et al., 2020,
"Learned Step Size Quantization", https://arxiv.org/abs/1902.08153). Each scale has a trained parameter: the logarithm
of the factor by which the scale changed since training began. An optimizer therefore changes all scales in proportion
to their size. Weight decay, which pulls parameters towards zero, pulls the scales towards their initial values.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from accel.artifact import Quantization
from accel.capture import (
    BlockLinear,
    IntegerLinear,
    needs_float_weights,
    pack,
    quiet,
    with_record,
)
from accel.config import PrepareConfig, QatConfig, matched_layers
from accel.errors import ConfigError, PrepareError
from accel.interfaces.protocols import Batches

from .distillation import Distillation
from .upstream import rounded_by_channel, rounded_by_tensor

logger = logging.getLogger(__name__)

SCHEME = "qat"
_TINY = 1e-8
# Clipping limits to try for each block of weights, as fractions of the largest weight in the block. Training starts
# with the limit that gives the smallest squared error.
_CUTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)
# Clipping limits to try for 4-bit weights with one scale per row or per layer, as fractions of the largest weight. A
# row or layer may contain a single very large weight, so the smallest limits are close to 0.
_WIDE_CUTS = tuple(0.9**power for power in range(40))


class _FakeQuantizedBase(torch.nn.Linear):
    """Base class of linear layers whose weight scales are trained. The layer shares the parameters of the linear layer
    that it replaces.

    A subclass registers `w_scale` and `w_zero` (scales and zero points at the start of training) and the parameter
    `w_log_change`.
    """

    w_scale: torch.Tensor
    w_zero: torch.Tensor
    w_log_change: torch.nn.Parameter

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias

    def _steps(self) -> torch.Tensor:
        """Return the current quantization scales of the weights."""
        return self.w_scale * self.w_log_change.exp()

    def _check_float32(self) -> None:
        if self.weight.dtype is not torch.float32:
            raise PrepareError(
                f"The weights of the model were converted to {self.weight.dtype}. Quantization-aware training needs float32 weights.",
                fix="call model.float(). To train in bfloat16, use torch.autocast or TrainingArguments(bf16=True).",
            )

    def _float_bias(self) -> torch.Tensor | None:
        return None if self.bias is None else self.bias.detach().float().cpu().clone()


class FakeQuantizedLinear(_FakeQuantizedBase):
    """Linear layer that rounds its inputs and weights to 8 bits in every call; its parameters stay in floating point.

    The layer has the parameters of the linear layer that it replaces, under the same names, and two more parameters:
    `x_log_change: ()`, and `w_log_change` with the shape `(outer,)` or `(1,)`. A checkpoint of the linear layer can
    therefore be loaded into this layer, and a checkpoint of this layer into the linear layer.

    Args:
        layer: The layer to replace; its parameters are shared.
        low, high: Smallest and largest input value in the calibration data.
        signed: Whether inputs are quantized symmetrically (int8, zero point 0) instead of to uint8 with a zero point.
        per_channel: Whether each output channel has its own weight scale.
        bits: Bits of the weights: 8, or 4. Weights of 4 bits are stored as int8.
    """

    x_scale: torch.Tensor
    x_zero: torch.Tensor

    def __init__(
        self, layer: torch.nn.Linear, low: float, high: float, *, signed: bool, per_channel: bool, bits: int
    ) -> None:
        super().__init__(layer)
        self.signed, self._top = signed, 2 ** (bits - 1) - 1
        self._limits = (-128, 127) if signed else (0, 255)
        low, high = min(low, 0.0), max(high, 0.0)
        step = max(abs(low), abs(high)) / 127 if signed else (high - low) / 255
        step = max(step, _TINY)
        weight = layer.weight.detach()
        largest = weight.abs().amax(1) if per_channel else weight.abs().amax().reshape(1)
        if bits == 4:
            largest = _cut_off(weight, largest, self._top)
        self.register_buffer("x_scale", torch.tensor([step], device=weight.device))
        self.register_buffer("w_scale", (largest / self._top).clamp(min=_TINY))
        self.x_log_change = torch.nn.Parameter(torch.zeros((), device=weight.device))
        self.w_log_change = torch.nn.Parameter(torch.zeros_like(self.w_scale))
        zero = 0.0 if signed else float(round(-low / step))
        self.register_buffer("x_zero", torch.tensor([zero], device=weight.device))
        self.register_buffer("w_zero", torch.zeros_like(self.w_scale), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer with rounded inputs and weights. `x` has the shape `(..., inner)`, and the output
        has the shape `(..., outer)`.
        """
        self._check_float32()
        low, high = self._limits
        x = rounded_by_tensor(
            x, self.x_scale * self.x_log_change.exp(), self.x_zero, low, high, 1 / math.sqrt(x.numel() * high)
        )
        scale, zero = (values.expand(self.out_features) for values in (self._steps(), self.w_zero))
        factor = 1 / math.sqrt(self.in_features * self._top)
        weight = rounded_by_channel(self.weight, scale, zero, 0, -self._top, self._top, factor)
        return functional.linear(x, weight, self.bias)

    @torch.no_grad()
    def to_integers(self) -> IntegerLinear:
        """Return an integer layer that computes the same outputs."""
        integer_layer = IntegerLinear(
            self.in_features, self.out_features, signed=self.signed, bias=self.bias is not None
        )
        integer_layer.scale = self._steps().expand(self.out_features).float().cpu().clone()
        # Multiply by the inverse of the scale instead of dividing, so that the result is identical to that of PyTorch's
        # rounding operator.
        rounded = torch.round(self.weight.float().cpu() * (1 / integer_layer.scale)[:, None])
        integer_layer.weight = rounded.clamp(-self._top, self._top).to(torch.int8)
        integer_layer.x_scale = (self.x_scale * self.x_log_change.exp()).reshape(()).float().cpu().clone()
        integer_layer.x_zero = self.x_zero.cpu().round().to(torch.int8 if self.signed else torch.uint8).reshape(())
        integer_layer.bias = self._float_bias()
        return integer_layer

    @torch.no_grad()
    def misfit(self) -> float:
        """Return the squared error of rounding as a fraction of the weights' squared sum. Return 0 if the error is
        small or the scales are near the best scales (see `accel.capture.Trained`).
        """
        weight, top = self.weight.detach(), self._top
        scale = self._steps()
        largest = weight.abs().amax(1) if len(scale) == len(weight) else weight.abs().amax().reshape(1)
        best = (_cut_off(weight, largest, top) / top).clamp(min=_TINY)
        now, least = (_squares_lost(weight, step, top).sum() for step in (scale, best))
        return _worth_telling(now, least, weight)


class BlockFakeQuantizedLinear(_FakeQuantizedBase):
    """Linear layer that rounds its weights to 4 bits in every call, in blocks that share a scale; inputs are not
    rounded.

    Args:
        layer: The layer to replace; its parameters are shared.
        block_size: Number of weights per block. It must divide the number of inputs of the layer.
    """

    def __init__(self, layer: torch.nn.Linear, block_size: int) -> None:
        super().__init__(layer)
        self.block_size = block_size
        scale, zero = _block_steps(layer.weight.detach().reshape(-1, block_size))
        self.w_log_change = torch.nn.Parameter(torch.zeros_like(scale))
        self.register_buffer("w_scale", scale)
        self.register_buffer("w_zero", zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer with rounded weights. `x` has the shape `(..., inner)`, the output `(..., outer)`."""
        self._check_float32()
        blocks = self.weight.reshape(-1, self.block_size)
        factor = 1 / math.sqrt(self.block_size * 15)
        weight = rounded_by_channel(blocks, self._steps(), self.w_zero, 0, 0, 15, factor)
        return functional.linear(x, weight.reshape(self.weight.shape), self.bias)

    @torch.no_grad()
    def to_integers(self) -> BlockLinear:
        """Return a layer with packed 4-bit weights that computes the same outputs."""
        count = self.in_features // self.block_size
        integer_layer = BlockLinear(
            self.in_features, self.out_features, bits=4, block_size=self.block_size, bias=self.bias is not None
        )
        scale, zero = self._steps().float().cpu(), self.w_zero.float().cpu()
        blocks = self.weight.detach().float().cpu().reshape(-1, self.block_size)
        values = (torch.round(blocks * (1 / scale)[:, None]) + zero[:, None]).clamp(0, 15).to(torch.uint8)
        integer_layer.packed = pack(values.reshape(self.out_features, count, self.block_size), 4)
        integer_layer.scales = scale.reshape(self.out_features, count).clone()
        integer_layer.zeros = pack(zero.to(torch.uint8).reshape(self.out_features, count), 4)
        integer_layer.bias = self._float_bias()
        return integer_layer

    @torch.no_grad()
    def misfit(self) -> float:
        """Return the squared error of rounding as a fraction of the weights' squared sum. Return 0 if the error is
        small or the scales are near the best scales (see `accel.capture.Trained`).
        """
        blocks = self.weight.detach().reshape(-1, self.block_size)
        now, least = (
            (
                torch.fake_quantize_per_channel_affine(blocks, scale, zero.to(torch.int32), 0, 0, 15) - blocks
            ).square().sum()
            for scale, zero in ((self._steps(), self.w_zero), _block_steps(blocks))
        )  # fmt: skip
        return _worth_telling(now, least, blocks)


def _worth_telling(now: torch.Tensor, least: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the squared error of rounding as a fraction of the weights' squared sum, or 0 if it needs no warning.

    An error needs a warning if the fraction is above 0.01 and the error is more than 4 times the smallest possible
    error. Training alone does not change the scales so much.
    """
    share = float(now / weight.square().sum().clamp(min=_TINY))
    return share if share > 0.01 and float(now) > 4 * float(least) else 0.0


def _squares_lost(weight: torch.Tensor, step: torch.Tensor, top: int) -> torch.Tensor:
    """Return the squared rounding error of each weight row.

    `weight: (outer, inner)` is rounded to integers from `-top` to `top` with scale `step: (outer,)` or `(1,)`.
    """
    step = step[:, None]
    return (torch.round(weight / step).clamp(-top, top) * step - weight).square().sum(1)


def _cut_off(weight: torch.Tensor, largest: torch.Tensor, top: int) -> torch.Tensor:
    """Return the best clipping limits of weights `(outer, inner)`.

    Each limit is `largest`, of shape `(outer,)` or `(1,)`, times the fraction that gives the smallest squared error
    after rounding to integers from `-top` to `top`.
    """
    errors = []
    for cut in _WIDE_CUTS:
        error = _squares_lost(weight, (largest * cut / top).clamp(min=_TINY), top)
        errors.append(error if len(largest) == len(weight) else error.sum().reshape(1))
    best = torch.stack(errors).argmin(0)
    return largest * torch.tensor(_WIDE_CUTS, device=largest.device)[best]


def _block_steps(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points `(blocks,)` of weight blocks `(blocks, size)`, with the best clipping limit of
    `_CUTS` for each block.
    """
    chosen: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for cut in _CUTS:
        low, high = blocks.amin(1).clamp(max=0) * cut, blocks.amax(1).clamp(min=0) * cut
        scale = ((high - low) / 15).clamp(min=_TINY)
        zero = torch.round(-low / scale).clamp(0, 15)
        rounded = torch.fake_quantize_per_channel_affine(blocks, scale, zero.to(torch.int32), 0, 0, 15)
        error = (rounded - blocks).square().sum(1)
        if chosen is None:
            chosen = scale, zero, error
            continue
        better = error < chosen[2]
        chosen = tuple(torch.where(better, new, old) for new, old in zip((scale, zero, error), chosen, strict=True))  # type: ignore[assignment]
    assert chosen is not None
    return chosen[0], chosen[1]


class TrainingPreparer:
    """Preparer that replaces the linear layers of a model with layers that simulate rounding during training."""

    def prepare(
        self, model: torch.nn.Module, *, config: PrepareConfig, calibration: Batches | None = None
    ) -> torch.nn.Module:
        """Replace the linear layers of a model in place and return the model; see
        `accel.interfaces.protocols.Preparer`.
        """
        if not isinstance(config, QatConfig) or config.scheme != SCHEME:
            raise ConfigError(
                f"The backend 'pytorch' prepares models only with the scheme {SCHEME!r} and a QatConfig, not with the scheme "
                f"{config.scheme!r} and a {type(config).__name__}.",
                fix="call accel.prepare_qat(model, ...).",
            )
        layers = _chosen(model, config)
        ranges: Mapping[str, tuple[float, float]] = {}
        if config.preset != "int4":
            if calibration is None:
                raise ConfigError(
                    f"The preset {config.preset!r} needs calibration data to measure the range of the activations.",
                    fix="pass calibration=... with at least a hundred rows of real inputs, or use preset='int4', which needs no "
                    "calibration data.",
                )
            ranges = _ranges(model, layers, calibration, config.samples)
        elif calibration is not None:
            raise ConfigError(
                "The preset 'int4' does not round activations, so it uses no calibration data.",
                fix="leave calibration=... out.",
            )
        new_layers = {layer: _trained(name, layer, ranges, config) for name, layer in layers.items()}
        _check_adapters(model, new_layers)
        teacher = copy.deepcopy(model).eval().requires_grad_(False) if config.distillation else None
        # If the model contains a layer under several names, replace the layer by the same new layer under all these
        # names.
        for name, module in [*model.named_modules(remove_duplicate=False)]:
            if module in new_layers:
                model.set_submodule(name, new_layers[module])
        if teacher is not None:
            hook = Distillation(teacher, config.distillation, config.temperature)
            model.register_forward_hook(hook, with_kwargs=True)
        scheme = "weight-int4" if config.preset == "int4" else "static-int8"
        return with_record(model, Quantization(scheme=scheme, preset=f"qat-{config.preset}", excluded=config.exclude))


def _trained(
    name: str, layer: torch.nn.Linear, ranges: Mapping[str, tuple[float, float]], config: QatConfig
) -> torch.nn.Module:
    if config.preset == "int4":
        return BlockFakeQuantizedLinear(layer, config.block_size)
    low, high = ranges[name]
    return FakeQuantizedLinear(
        layer,
        low,
        high,
        signed=config.preset == "int8-symmetric",
        per_channel=not config.preset.endswith("per-tensor"),
        bits=4 if config.preset.startswith("int4") else 8,
    )


def _chosen(model: torch.nn.Module, config: QatConfig) -> dict[str, torch.nn.Linear]:
    """Return the linear layers to replace, by name.

    Raises:
        ConfigError: A pattern in `exclude` matches no layer, or `block_size` does not divide the inputs of a layer.
        PrepareError: The model has no linear layer to replace, or the model is not in float32, or it is already
            prepared or accelerated.
    """
    if any(isinstance(module, _FakeQuantizedBase) for module in model.modules()):
        raise PrepareError(
            "The model is already prepared for quantization-aware training.",
            fix="train the model as it is, or load the float model again and prepare the new model.",
        )
    if any("acceleration" in vars(module) for module in model.modules()):
        raise PrepareError(
            "The model is accelerated by accel.accelerate, and accelerated models cannot be trained.",
            fix="call model.restore() first.",
        )
    half = next((p for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32), None)
    if half is not None:
        raise PrepareError(
            f"The model has parameters in {half.dtype}. Quantization-aware training needs a model in float32.",
            fix="pass model.float().",
        )
    tied = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    adapters = _adapters(model)
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and id(module.weight) not in tied and module not in adapters
    }
    excluded = matched_layers(config.exclude, [(name,) for name in layers])
    layers = {name: module for i, (name, module) in enumerate(layers.items()) if i not in excluded}
    others = [name for name, module in model.named_modules() if isinstance(module, Conv1D)]
    if not layers:
        raise PrepareError(
            "The model has no torch.nn.Linear layer that accel can quantize, or exclude=... matches all of these layers."
            + (
                f" {len(others)} layers, such as {others[0]}, have the class Conv1D, which is not supported."
                if others
                else ""
            ),
            fix="exclude fewer layers, or prepare another model.",
        )
    if others:
        logger.warning(
            "%d layers of the class Conv1D (%s, ...) stay in floating point. accel quantizes only the %d layers of the class "
            "torch.nn.Linear.", len(others), others[0], len(layers),
        )  # fmt: skip
    if config.preset == "int4":
        undivided = next((name for name, module in layers.items() if module.in_features % config.block_size), None)
        if undivided is not None:
            raise ConfigError(
                f"block_size={config.block_size} does not divide the number of input features of the layer {undivided}, which is "
                f"{layers[undivided].in_features}.",
                fix=f"use a smaller block_size, or exclude=[{undivided!r}].",
            )
    return layers


def _adapters(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the modules of PEFT adapters, which stay in floating point.

    These modules are the small layers of the adapters, and the original copies of layers in `modules_to_save`. The
    small layers need little computation, and PEFT's code reads the data type of their weights. The original copies are
    never called.
    """
    adapter_modules: list[torch.nn.Module | None] = []
    for parent in model.modules():
        if hasattr(type(parent), "adapter_layer_names") and "base_layer" in parent._modules:
            names: Any = parent.adapter_layer_names
            adapter_modules += [parent._modules.get(name) for name in names]
        if "modules_to_save" in parent._modules:
            adapter_modules.append(parent._modules.get("original_module"))
    return {part for module in adapter_modules if module is not None for part in module.modules()}


def _check_adapters(model: torch.nn.Module, new_layers: Mapping[torch.nn.Linear, torch.nn.Module]) -> None:
    """Raise if an adapter computes with the floating-point weights of a base layer that is quantized.

    Raises:
        PrepareError: An adapter needs the floating-point weights; the message contains the name of the first adapter.
    """
    for name, module in model.named_modules():
        below = module._modules.get("base_layer")
        layer = new_layers.get(below) if isinstance(below, torch.nn.Linear) else None
        if isinstance(layer, FakeQuantizedLinear | BlockFakeQuantizedLinear) and needs_float_weights(module, layer):
            raise PrepareError(
                f"The adapter {name} ({type(module).__name__}) computes with the weights of its base layer. This is not possible after "
                "the weights of the base layer are quantized.",
                fix="merge the adapter first (model = model.merge_and_unload()), or use LoRA without DoRA (use_dora=False).",
            )


def _ranges(
    model: torch.nn.Module, layers: Mapping[str, torch.nn.Linear], calibration: Batches, samples: int
) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest input value of each layer, measured on the calibration data.

    Raises:
        PrepareError: The calibration data is empty, the model does not use one of the layers for this data, or the
            model raises an exception.
    """
    ranges: dict[str, tuple[float, float]] = {}

    def watch(name: str) -> Any:
        def hook(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            low, high = ranges.get(name, (math.inf, -math.inf))
            least, most = float(args[0].min()), float(args[0].max())
            if not math.isfinite(least) or not math.isfinite(most):
                raise ValueError(f"the inputs of the layer {name} contain NaN or infinity")
            ranges[name] = (min(low, least), max(high, most))

        return hook

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    # Labels are removed from the batches, except for encoder-decoder models, which create the decoder inputs from them.
    encodes = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    training = [module for module in model.modules() if module.training]
    device, rows = next(model.parameters()).device, 0
    try:
        model.eval()
        with torch.no_grad(), quiet():
            for batch in calibration:
                if rows >= samples:
                    break
                left_out = () if encodes and "decoder_input_ids" not in batch else ("labels",)
                feeds = {n: value[: samples - rows].to(device) for n, value in batch.items() if n not in left_out}
                rows += len(next(iter(feeds.values())))
                model(**feeds)
    # The model's code runs on data from the caller, so it may raise any exception.
    except Exception as error:
        raise PrepareError(
            f"The model does not run on the calibration data: {type(error).__name__}: {error}",
            fix="pass batches that model(**batch) accepts: dictionaries with input names as keys and tensors as values.",
        ) from error
    finally:
        for module in training:
            # `model.train()` would be wrong, because some modules may have been in evaluation mode before calibration.
            module.training = True
        for hook in hooks:
            hook.remove()
    missing = sorted(set(layers) - set(ranges))
    if not rows or missing:
        names = ", ".join(missing[:3])
        raise PrepareError(
            f"The model does not use the layers {names} for the calibration data, so the range of their inputs is unknown."
            if rows
            else "The calibration data contains no rows.",
            fix="pass inputs for which the model uses these layers, or exclude the layers with exclude=[...]."
            if rows
            else "pass batches of real inputs as calibration=...",
        )
    return ranges
