"""Quantization-aware training: linear layers that round while they are trained, and become integers when they are exported.

Rounding and its gradients are PyTorch's own operators (learned step sizes: Esser et al., 2020, "Learned Step Size Quantization",
https://arxiv.org/abs/1902.08153). What is learned of a step is the logarithm of its change since training began: an optimizer moves
steps by parts of themselves, whatever their size, and weight decay, which pulls parameters towards zero, leaves them where they began.
"""

from __future__ import annotations

import logging
import math
import re
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
    replace_layer,
    with_record,
)
from accel.config import PrepareConfig, QatConfig
from accel.errors import ConfigError, PrepareError, did_you_mean
from accel.interfaces.protocols import Batches

from .distillation import Distillation

logger = logging.getLogger(__name__)

SCHEME = "qat"
_TINY = 1e-8
# Shares of the largest weight at which a block may be cut off; the one with the smallest squared error is where training begins.
_CUTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)
# The same for weights with 15 values that share a step by row or by layer, whose largest may be far from all others.
_WIDE_CUTS = tuple(0.9**power for power in range(40))


class TrainedLinear(torch.nn.Linear):
    """A linear layer whose inputs and weights are rounded to 8 bits in every call; the parameters stay in floating point.

    Its parameters have the names of the layer that it replaces, and two more (`x_log_change: ()`, `w_log_change: (outer,)` or
    `(1,)`), so a checkpoint of either loads into the other.

    Args:
        layer: What is replaced; its parameters are shared.
        low, high: Smallest and largest input seen.
        signed: Whether inputs are rounded around zero.
        per_channel: Whether each output channel has a step of its own.
        bits: Of the weights, 8 or 4; kept in 8 either way.
    """

    x_scale: torch.Tensor
    x_zero: torch.Tensor
    w_scale: torch.Tensor
    w_zero: torch.Tensor

    def __init__(
        self, layer: torch.nn.Linear, low: float, high: float, *, signed: bool, per_channel: bool, bits: int
    ) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
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
        """`(..., inner)` to `(..., outer)`."""
        _check_float32(self.weight)
        low, high = self._limits
        x = torch._fake_quantize_learnable_per_tensor_affine(
            x, self.x_scale * self.x_log_change.exp(), self.x_zero, low, high, 1 / math.sqrt(x.numel() * high)
        )
        scale = (self.w_scale * self.w_log_change.exp()).expand(self.out_features)
        zero = self.w_zero.expand(self.out_features)
        factor = 1 / math.sqrt(self.in_features * self._top)
        weight = torch._fake_quantize_learnable_per_channel_affine(
            self.weight, scale, zero, 0, -self._top, self._top, factor
        )
        return functional.linear(x, weight, self.bias)

    @torch.no_grad()
    def to_integers(self) -> IntegerLinear:
        """The layer with integers, which computes the same."""
        made = IntegerLinear(self.in_features, self.out_features, signed=self.signed, bias=self.bias is not None)
        made.scale = (self.w_scale * self.w_log_change.exp()).expand(self.out_features).float().cpu().clone()
        # The operator multiplies by the inverse.
        rounded = torch.round(self.weight.float().cpu() * (1 / made.scale)[:, None])
        made.weight = rounded.clamp(-self._top, self._top).to(torch.int8)
        made.x_scale = (self.x_scale * self.x_log_change.exp()).reshape(()).float().cpu().clone()
        made.x_zero = self.x_zero.cpu().round().to(torch.int8 if self.signed else torch.uint8).reshape(())
        if self.bias is not None:
            made.bias = self.bias.detach().float().cpu().clone()
        return made

    @torch.no_grad()
    def misfit(self) -> float:
        """See `accel.capture.Trained`."""
        weight, top = self.weight.detach(), self._top
        scale = self.w_scale * self.w_log_change.exp()
        largest = weight.abs().amax(1) if len(scale) == len(weight) else weight.abs().amax().reshape(1)
        best = (_cut_off(weight, largest, top) / top).clamp(min=_TINY)
        now, least = (_squares_lost(weight, step, top).sum() for step in (scale, best))
        return _worth_telling(now, least, weight)


class TrainedBlocks(torch.nn.Linear):
    """A linear layer whose weights are rounded to 4 bits in blocks in every call; inputs stay as they are.

    Args:
        layer: What is replaced; its parameters are shared.
        block_size: Weights that share a step; divides the layer's inputs.
    """

    w_scale: torch.Tensor
    w_zero: torch.Tensor

    def __init__(self, layer: torch.nn.Linear, block_size: int) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.block_size = block_size
        scale, zero = _block_steps(layer.weight.detach().reshape(-1, block_size))
        self.w_log_change = torch.nn.Parameter(torch.zeros_like(scale))
        self.register_buffer("w_scale", scale)
        self.register_buffer("w_zero", zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., inner)` to `(..., outer)`."""
        _check_float32(self.weight)
        blocks = self.weight.reshape(-1, self.block_size)
        factor = 1 / math.sqrt(self.block_size * 15)
        weight = torch._fake_quantize_learnable_per_channel_affine(
            blocks, self.w_scale * self.w_log_change.exp(), self.w_zero, 0, 0, 15, factor
        )
        return functional.linear(x, weight.reshape(self.weight.shape), self.bias)

    @torch.no_grad()
    def to_integers(self) -> BlockLinear:
        """The layer with packed weights, which computes the same."""
        count = self.in_features // self.block_size
        made = BlockLinear(
            self.in_features, self.out_features, bits=4, block_size=self.block_size, bias=self.bias is not None
        )
        scale, zero = (self.w_scale * self.w_log_change.exp()).float().cpu(), self.w_zero.float().cpu()
        blocks = self.weight.detach().float().cpu().reshape(-1, self.block_size)
        values = (torch.round(blocks * (1 / scale)[:, None]) + zero[:, None]).clamp(0, 15).to(torch.uint8)
        made.packed = pack(values.reshape(self.out_features, count, self.block_size), 4)
        made.scales = scale.reshape(self.out_features, count).clone()
        made.zeros = pack(zero.to(torch.uint8).reshape(self.out_features, count), 4)
        if self.bias is not None:
            made.bias = self.bias.detach().float().cpu().clone()
        return made

    @torch.no_grad()
    def misfit(self) -> float:
        """See `accel.capture.Trained`."""
        blocks = self.weight.detach().reshape(-1, self.block_size)
        now, least = (
            (
                torch.fake_quantize_per_channel_affine(blocks, scale, zero.to(torch.int32), 0, 0, 15) - blocks
            ).square().sum()
            for scale, zero in ((self.w_scale * self.w_log_change.exp(), self.w_zero), _block_steps(blocks))
        )  # fmt: skip
        return _worth_telling(now, least, blocks)


def _worth_telling(now: torch.Tensor, least: torch.Tensor, weight: torch.Tensor) -> float:
    """The share of a weight's squares that is lost, where the steps are far from those that lose least: training for a task moves
    them, by less.
    """
    share = float(now / weight.square().sum().clamp(min=_TINY))
    return share if share > 0.01 and float(now) > 4 * float(least) else 0.0


def _squares_lost(weight: torch.Tensor, step: torch.Tensor, top: int) -> torch.Tensor:
    """By row: squared error of weights `(outer, inner)` that are rounded to `-top` to `top` steps, `(outer,) or (1,)`."""
    step = step[:, None]
    return (torch.round(weight / step).clamp(-top, top) * step - weight).square().sum(1)


def _check_float32(weight: torch.Tensor) -> None:
    if weight.dtype is not torch.float32:
        raise PrepareError(
            f"The model was turned to {weight.dtype}; steps are learned in float32.",
            fix="call model.float(), and train under torch.autocast, or with TrainingArguments(bf16=True).",
        )


def _cut_off(weight: torch.Tensor, largest: torch.Tensor, top: int) -> torch.Tensor:
    """Where to cut weights `(outer, inner)` off: of the shares of `largest: (outer,) or (1,)` that are tried, those with the
    smallest squared error of what is rounded to `-top` to `top`.
    """
    errors = []
    for cut in _WIDE_CUTS:
        error = _squares_lost(weight, (largest * cut / top).clamp(min=_TINY), top)
        errors.append(error if len(largest) == len(weight) else error.sum().reshape(1))
    best = torch.stack(errors).argmin(0)
    return largest * torch.tensor(_WIDE_CUTS, device=largest.device)[best]


def _block_steps(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps and zero points `(blocks,)` of blocks `(blocks, size)`: of the cuts that are tried, the best for each block."""
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for cut in _CUTS:
        low, high = blocks.amin(1).clamp(max=0) * cut, blocks.amax(1).clamp(min=0) * cut
        scale = ((high - low) / 15).clamp(min=_TINY)
        zero = torch.round(-low / scale).clamp(0, 15)
        rounded = torch.fake_quantize_per_channel_affine(blocks, scale, zero.to(torch.int32), 0, 0, 15)
        error = (rounded - blocks).square().sum(1)
        if best is None:
            best = scale, zero, error
            continue
        better = error < best[2]
        best = tuple(torch.where(better, new, old) for new, old in zip((scale, zero, error), best, strict=True))  # type: ignore[assignment]
    assert best is not None
    return best[0], best[1]


class TrainingPreparer:
    """Puts rounding layers in the place of a model's linear layers."""

    def prepare(
        self, model: torch.nn.Module, *, config: PrepareConfig, calibration: Batches | None = None
    ) -> torch.nn.Module:
        """The given model, changed; see `accel.interfaces.protocols.Preparer`."""
        if not isinstance(config, QatConfig) or config.scheme != SCHEME:
            raise ConfigError(
                f"PyTorch does not prepare models with {config.scheme!r} and a {type(config).__name__}.",
                fix=f"use the scheme {SCHEME!r} with a QatConfig: accel.prepare_qat(model, ...).",
            )
        layers = _chosen(model, config)
        ranges: Mapping[str, tuple[float, float]] = {}
        if config.preset != "int4":
            if calibration is None:
                raise ConfigError(
                    f"The preset {config.preset!r} needs calibration data, for the range in which activations are rounded.",
                    fix="pass calibration=..., a hundred rows of real inputs or more; the preset int4 needs none.",
                )
            ranges = _ranges(model, layers, calibration, config.samples)
        elif calibration is not None:
            raise ConfigError("The preset 'int4' rounds no activations.", fix="leave calibration out.")
        made = {layer: _trained(name, layer, ranges, config) for name, layer in layers.items()}
        _check_adapters(model, made)
        teacher = _teacher(model, config)
        # A layer that a model has under several names is one again.
        for name, one in [*model.named_modules(remove_duplicate=False)]:
            if one in made:
                replace_layer(model, name, made[one])
        if teacher is not None:
            hook = Distillation(teacher, config.distillation, config.temperature)
            model.register_forward_hook(hook, with_kwargs=True)
        scheme = "weight-int4" if config.preset == "int4" else "static-int8"
        return with_record(model, Quantization(scheme=scheme, preset=f"qat-{config.preset}", excluded=config.exclude))


def _teacher(model: torch.nn.Module, config: QatConfig) -> torch.nn.Module | None:
    if not config.distillation:
        return None
    import copy

    return copy.deepcopy(model).eval().requires_grad_(False)


def _trained(
    name: str, layer: torch.nn.Linear, ranges: Mapping[str, tuple[float, float]], config: QatConfig
) -> torch.nn.Module:
    if config.preset == "int4":
        return TrainedBlocks(layer, config.block_size)
    low, high = ranges[name]
    return TrainedLinear(
        layer,
        low,
        high,
        signed=config.preset == "int8-symmetric",
        per_channel=not config.preset.endswith("per-tensor"),
        bits=4 if config.preset.startswith("int4") else 8,
    )


def _chosen(model: torch.nn.Module, config: QatConfig) -> dict[str, torch.nn.Linear]:
    """The layers to train for integers, by name.

    Raises:
        ConfigError: `exclude` matches nothing, or block_size does not divide a layer.
        PrepareError: There is none, or the model is prepared or accelerated already.
    """
    if any(isinstance(one, TrainedLinear | TrainedBlocks) for one in model.modules()):
        raise PrepareError("The model is prepared already.", fix="train it, or load the float model again.")
    if any("acceleration" in vars(one) for one in model.modules()):
        raise PrepareError("The model is accelerated, which is for inference.", fix="call model.restore() first.")
    wrong = next((p for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32), None)
    if wrong is not None:
        raise PrepareError(f"The model is {wrong.dtype}; steps are learned in float32.", fix="pass model.float().")
    tied = {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Embedding)}
    adapters = _adapters(model)
    found = {
        name: one
        for name, one in model.named_modules()
        if type(one) is torch.nn.Linear and id(one.weight) not in tied and one not in adapters
    }
    for pattern in config.exclude:
        search = re.compile(pattern.removeprefix("re:")).search if pattern.startswith("re:") else None
        out = [name for name in found if (search(name) if search else name == pattern)]
        if not out:
            raise ConfigError(
                f"exclude holds {pattern!r}, which matches no linear layer.{did_you_mean(pattern, found)}",
                fix="use a layer's name, or `re:` and a regular expression.",
            )
        found = {name: one for name, one in found.items() if name not in out}
    others = [name for name, one in model.named_modules() if isinstance(one, Conv1D)]
    if not found:
        raise PrepareError(
            "The model has no linear layer to round"
            + (f": {others[0]} and {len(others) - 1} others are of the kind Conv1D." if others else "."),
            fix="exclude fewer layers, or prepare another model.",
        )
    if others:
        logger.warning(
            "%d layers of the kind Conv1D (%s, ...) stay in floating point: only linear layers are trained for integers, of which the "
            "model has %d.", len(others), others[0], len(found),
        )  # fmt: skip
    if config.preset == "int4":
        odd = next((name for name, one in found.items() if one.in_features % config.block_size), None)
        if odd is not None:
            raise ConfigError(
                f"block_size {config.block_size} does not divide the {found[odd].in_features} inputs of {odd}.",
                fix="use a smaller block_size, or exclude the layer.",
            )
    return found


def _adapters(model: torch.nn.Module) -> set[torch.nn.Module]:
    """What PEFT puts beside layers: the small layers of adapters (few multiplications, and their code reads the type of their
    weights), and layers that are trained whole as they were before, which nothing calls.
    """
    beside: list[torch.nn.Module | None] = []
    for one in model.modules():
        if hasattr(type(one), "adapter_layer_names") and "base_layer" in one._modules:
            names: Any = one.adapter_layer_names
            beside += [one._modules.get(name) for name in names]
        if "modules_to_save" in one._modules:
            beside.append(one._modules.get("original_module"))
    return {part for held in beside if held is not None for part in held.modules()}


def _check_adapters(model: torch.nn.Module, made: Mapping[torch.nn.Linear, torch.nn.Module]) -> None:
    """Refuse adapters that compute with the weights below them.

    Raises:
        PrepareError: With the first one.
    """
    for name, one in model.named_modules():
        below = one._modules.get("base_layer")
        layer = made.get(below) if isinstance(below, torch.nn.Linear) else None
        if isinstance(layer, TrainedLinear | TrainedBlocks) and needs_float_weights(one, layer):
            raise PrepareError(
                f"The adapter {name} ({type(one).__name__}) computes with the weights of the layer below it, which become integers.",
                fix="merge it first (model.merge_and_unload()), or use plain LoRA; DoRA reads them.",
            )


def _ranges(
    model: torch.nn.Module, layers: Mapping[str, torch.nn.Linear], calibration: Batches, samples: int
) -> dict[str, tuple[float, float]]:
    """Smallest and largest input of each layer.

    Raises:
        PrepareError: There is no data, or it does not reach a layer.
    """
    found: dict[str, tuple[float, float]] = {}

    def watch(name: str) -> Any:
        def hook(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            low, high = found.get(name, (math.inf, -math.inf))
            least, most = float(args[0].min()), float(args[0].max())
            if not math.isfinite(least) or not math.isfinite(most):
                raise ValueError(f"the inputs of {name} are not all finite")
            found[name] = (min(low, least), max(high, most))

        return hook

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    # Decoders make their inputs from the labels.
    encodes = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    training = [one for one in model.modules() if one.training]
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
    # The model's own code with the caller's data, which may raise anything.
    except Exception as error:
        raise PrepareError(
            f"The model does not run on the calibration data: {type(error).__name__}: {error}",
            fix="pass batches as the model takes them: dictionaries of tensors by the names of its inputs.",
        ) from error
    finally:
        for one in training:
            # Itself alone: parts may be left in evaluation mode.
            one.training = True
        for hook in hooks:
            hook.remove()
    missing = sorted(set(layers) - set(found))
    if not rows or missing:
        what = "is empty" if not rows else f"does not reach {', '.join(missing[:3])}"
        raise PrepareError(f"The calibration data {what}.", fix="pass real inputs, or exclude those layers.")
    return found
