"""Linear layers that hold integers: what quantizers of PyTorch models make, and what exporters write into graphs.

A quantizer replaces layers of a model by the two kinds here, and `save_quantized` writes the model with its integers, without a
copy in floating point. PyTorch computes with them by rounding as a runtime would (`accel_layers::integer_linear`) or from the weights
that the blocks stand for (`accel_layers::block_linear`). A backend lowers both operators to its own.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn import functional

from ..artifact.manifest import MANIFEST, Artifact, Origin, Quantization
from ..artifact.reading import build, read_json
from ..errors import ExportError, IntegrityError
from ..upstream.library_output import quiet

OPERATOR_DOMAIN = "accel_layers"
INTEGER_LINEAR, BLOCK_LINEAR = "integer_linear", "block_linear"
WEIGHTS_FILE, LAYERS_FILE = "accel_quantized.safetensors", "accel_quantized.json"
# What parameters of layers that are trained for integers end with, beside weights and biases.
TRAINED_STEPS = (".x_log_change", ".w_log_change")
_SCHEMA = 1
logger = logging.getLogger(__name__)
_symbolic: ContextVar[bool] = ContextVar("accel_symbolic_linear", default=False)
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
    # Packages of compiled code from before `inner` leave it out.
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
    """The last axis of `(..., n) uint8` in bytes, the lower half first: `(..., n / 2)` for 4 bits, `(..., n)` for 8."""
    if bits == 8:
        return values.contiguous()
    if values.shape[-1] % 2:
        values = functional.pad(values, (0, 1))
    return values[..., 0::2] | (values[..., 1::2] << 4)


def unpack(packed: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """What `pack` was given: `(..., size) uint8`."""
    if bits == 8:
        return packed[..., :size]
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)[..., :size]


def block_weight(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, inner: int
) -> torch.Tensor:
    """The matrix `(outer, inner) float32` that blocks stand for; see `BlockLinear` for the arguments."""
    values = unpack(packed, bits, packed.shape[-1] * (8 // bits)).float()
    centers = zeros if zeros.is_floating_point() else unpack(zeros, bits, scales.shape[1]).float()
    return ((values - centers[..., None]) * scales[..., None]).flatten(1)[:, :inner]


class IntegerLinear(torch.nn.Module):
    """A linear layer that multiplies integers: activations in 8 bits with one fixed scale, weights in 8 bits.

    Args:
        inner, outer: Sizes of what goes in and comes out.
        signed: Whether activations are `int8`, instead of `uint8`.
        bias: Whether something is added.

    Attributes:
        weight: `(outer, inner) int8`.
        scale, zero: `(outer,)` float32 and int8: of the weights.
        x_scale, x_zero: `()`: of the activations.
        factor: `(inner,) float32`: what the activations are multiplied by before they are rounded (SmoothQuant); or `None`.
        bias: `(outer,) float32`, or `None`.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    x_scale: torch.Tensor
    x_zero: torch.Tensor
    factor: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self, inner: int, outer: int, *, signed: bool = False, bias: bool = True, factor: bool = False
    ) -> None:
        super().__init__()
        self.inner, self.outer, self.signed = inner, outer, signed
        self.register_buffer("weight", torch.zeros(outer, inner, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(outer))
        self.register_buffer("zero", torch.zeros(outer, dtype=torch.int8))
        self.register_buffer("x_scale", torch.ones(()))
        self.register_buffer("x_zero", torch.zeros((), dtype=torch.int8 if signed else torch.uint8))
        self.register_buffer("factor", torch.ones(inner) if factor else None)
        self.register_buffer("bias", torch.zeros(outer) if bias else None)

    def description(self) -> dict[str, Any]:
        """What makes an empty layer like this one."""
        return {
            "kind": "integers",
            "inner": self.inner,
            "outer": self.outer,
            "signed": self.signed,
            "bias": self.bias is not None,
            "factor": self.factor is not None,
        }

    def dequantized(self) -> torch.Tensor:
        """The weights that the integers stand for: `(outer, inner) float32`."""
        return _dequantized(self.weight, self.scale, self.zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., inner)` to `(..., outer)`."""
        x = x if self.factor is None else x * self.factor
        inputs = (x, self.x_scale, self.x_zero, self.weight, self.scale, self.zero)
        made = _applied(INTEGER_LINEAR, _integer_linear, inputs, self.outer)
        return made if self.bias is None else made + self.bias


class BlockLinear(torch.nn.Module):
    """A linear layer whose weights are 4 or 8 bits in blocks along the inner axis; activations stay as they are.

    Args:
        inner, outer: Sizes of what goes in and comes out.
        bits: 4 or 8.
        block_size: Weights that share a scale.
        whole_zeros: Whether zero points are integers, which are packed like weights; else they are float32.
        bias: Whether something is added.
        factor: Whether inputs are multiplied by a vector before (AWQ).

    Attributes:
        packed: `(outer, blocks, block_size * bits / 8) uint8`.
        scales: `(outer, blocks) float32`.
        zeros: `(outer, blocks * bits / 8) uint8`, or `(outer, blocks) float32`.
        factor: `(inner,) float32`, or `None`.
        bias: `(outer,) float32`, or `None`.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    factor: torch.Tensor | None
    bias: torch.Tensor | None

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
    ) -> None:
        super().__init__()
        self.inner, self.outer, self.bits, self.block_size = inner, outer, bits, block_size
        blocks = -(-inner // block_size)
        zeros = (
            torch.zeros(outer, -(-blocks * bits // 8), dtype=torch.uint8) if whole_zeros else torch.zeros(outer, blocks)
        )
        self.register_buffer("packed", torch.zeros(outer, blocks, block_size * bits // 8, dtype=torch.uint8))
        self.register_buffer("scales", torch.ones(outer, blocks))
        self.register_buffer("zeros", zeros)
        self.register_buffer("factor", torch.ones(inner) if factor else None)
        self.register_buffer("bias", torch.zeros(outer) if bias else None)

    def description(self) -> dict[str, Any]:
        """What makes an empty layer like this one."""
        return {
            "kind": "blocks",
            "inner": self.inner,
            "outer": self.outer,
            "bits": self.bits,
            "block_size": self.block_size,
            "whole_zeros": not self.zeros.is_floating_point(),
            "bias": self.bias is not None,
            "factor": self.factor is not None,
        }

    @property
    def weight(self) -> torch.Tensor:
        """No values, in the type that the layer computes in: models turn activations to the type of a layer's weights (T5)."""
        return self.scales[:0]

    def dequantized(self) -> torch.Tensor:
        """The weights that the blocks stand for: `(outer, inner) float32`."""
        return block_weight(self.packed, self.scales, self.zeros, self.bits, self.inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., inner)` to `(..., outer)`."""
        x = x if self.factor is None else x * self.factor
        inputs = (x, self.packed, self.scales, self.zeros)
        attributes = {"bits": self.bits, "block_size": self.block_size, "inner": self.inner}
        made = _applied(
            BLOCK_LINEAR, lambda *given: _block_linear(*given, self.bits, self.inner), inputs, self.outer, attributes
        )
        return made if self.bias is None else made + self.bias


_KINDS: dict[str, Callable[..., torch.nn.Module]] = {"integers": IntegerLinear, "blocks": BlockLinear}
QuantizedLinear = IntegerLinear | BlockLinear


@runtime_checkable
class Trained(Protocol):
    """A layer that was trained for integers, and can be made one."""

    def to_integers(self) -> QuantizedLinear:
        """The layer with integers, which computes the same."""

    def misfit(self) -> float:
        """Share of the weights' squares that is lost because the steps do not fit the weights; zero where other steps
        would not help much.
        """


def _applied(
    name: str,
    apply: Callable[..., Any],
    inputs: tuple[Any, ...],
    outer: int,
    attributes: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """The operator's result: computed, or left in a trace as a node of ONNX."""
    x: torch.Tensor = inputs[0]
    # torch.compile leaves no nodes, and before PyTorch 2.13 cannot read the variable.
    if torch.compiler.is_dynamo_compiling() or not _symbolic.get():
        made: torch.Tensor = apply(*inputs)
        return made
    left: torch.Tensor = torch.onnx.ops.symbolic(
        f"{OPERATOR_DOMAIN}::{name}",
        inputs,
        dict(attributes or {}),
        dtype=x.dtype,
        shape=(*x.shape[:-1], outer),
        version=1,
    )
    return left


@contextmanager
def symbolic_layers() -> Iterator[None]:
    """While a model is traced for ONNX: quantized layers leave their operators in the trace as nodes."""
    token = _symbolic.set(True)
    try:
        yield
    finally:
        _symbolic.reset(token)


def quantized_layers(model: torch.nn.Module) -> dict[str, QuantizedLinear]:
    """The layers of a model that hold integers, by name."""
    return {name: one for name, one in model.named_modules() if isinstance(one, IntegerLinear | BlockLinear)}


def replace_layer(model: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    """Put a layer in the place of the one that a model has under a name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def with_record(model: torch.nn.Module, quantization: Quantization) -> torch.nn.Module:
    """The same model, which remembers how it was quantized, for the manifests of what is made from it."""
    object.__setattr__(model, _RECORD, quantization)
    return model


def record_of(model: torch.nn.Module) -> Quantization | None:
    """How a model was quantized; `None` for a model in floating point."""
    found = (getattr(one, _RECORD, None) for one in model.modules())
    return next((one for one in found if one is not None), None)


def needs_float_weights(adapter: torch.nn.Module, layer: Trained) -> bool:
    """Whether what PEFT puts around a layer computes with the layer's weights (DoRA's norms, rotations): integers are none.

    Args:
        adapter: Has the layer under `base_layer`; stays as it is.
        layer: The layer.
    """
    tried = copy.deepcopy(adapter).eval()
    weight: torch.Tensor = layer.weight  # type: ignore[attr-defined]
    x = torch.randn((8, weight.shape[1]), generator=torch.Generator().manual_seed(0)).to(weight.device)
    answers = []
    for below in (layer, layer.to_integers().to(weight.device)):
        tried._modules["base_layer"] = below  # type: ignore[assignment]
        try:
            with torch.no_grad():
                answers.append(tried(x))
        except RuntimeError:
            # The `weight` of blocks is empty.
            return True
    before, after = answers
    # A value between two steps may fall to either side.
    return bool((after - before).abs().max() > 0.1 * before.abs().max())


def without_training(model: torch.nn.Module) -> torch.nn.Module:
    """A model that was trained for integers, as one that has them; any other model itself. The given one stays as it is.

    Raises:
        ExportError: An adapter computes with the weights of a layer that becomes integers.
    """
    # By its class: wrappers hand on what the layer inside them has.
    if not any(hasattr(type(one), "to_integers") for one in model.modules()):
        return model
    record = record_of(model)
    made = copy.deepcopy(model).eval()
    found = [(n, one) for n, one in made.named_modules(remove_duplicate=False) if hasattr(type(one), "to_integers")]
    for name, one in made.named_modules():
        layer = one._modules.get("base_layer")
        if hasattr(type(layer), "to_integers") and isinstance(layer, Trained) and needs_float_weights(one, layer):
            raise ExportError(
                f"The adapter {name} ({type(one).__name__}) computes with the weights of the layer below it, which become integers.",
                fix="merge it into the float model first (model.merge_and_unload()), then prepare that; plain LoRA does not do it.",
            )
    misfits = {n: one.misfit() for n, one in found if isinstance(one, Trained)}
    if worst := max(misfits, key=misfits.__getitem__) if any(misfits.values()) else "":
        logger.warning(
            "%d of %d layers have weights that the steps they are rounded by do not fit, as where an adapter was merged: %s loses %.0f %% "
            "of their squares. To have them fit, load the model's weights into the float model (load_state_dict(..., strict=False)), and "
            "prepare that.", sum(map(bool, misfits.values())), len(misfits), worst, 100 * misfits[worst],
        )  # fmt: skip
    integers: dict[int, torch.nn.Module] = {}
    for name, layer in found:
        assert isinstance(layer, Trained)
        # A layer that a model has under several names is one again.
        if id(layer) not in integers:
            integers[id(layer)] = layer.to_integers()
        replace_layer(made, name, integers[id(layer)])
    return made if record is None else with_record(made, record)


def save_quantized(model: torch.nn.Module, folder: Path) -> tuple[str, ...]:
    """Write the weights of a model with quantized layers; gives the names of the files.

    Raises:
        ExportError: It has adapters beside its layers, which no config tells of.
    """
    from safetensors.torch import save_model

    if getattr(model, "peft_config", None) is not None:
        raise ExportError(
            f"A {type(model).__name__} with adapters beside quantized layers is not written for PyTorch.",
            fix="export it with format='onnx' or 'openvino_ir', or merge the adapters first (model.merge_and_unload()).",
        )

    # A model that is read by transformers' own `from_pretrained` would get random weights with a warning: hence other names.
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
    """What each quantized layer is, by name; of one that the model has under several names, the others name the first."""
    firsts: dict[torch.nn.Module, str] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, one in model.named_modules(remove_duplicate=False):
        if isinstance(one, IntegerLinear | BlockLinear):
            first = firsts.setdefault(one, name)
            found[name] = one.description() if first == name else {"same": first}
    return found


def _save_configs(model: Any, folder: Path) -> None:
    """The configs beside the weights, with the name of the class, as `save_pretrained` writes them."""
    config = copy.deepcopy(getattr(model, "config", None))
    if config is None:
        return
    config.architectures = [type(model).__name__]
    with quiet():
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(folder)


def holds_quantized(folder: Path) -> bool:
    """Whether a folder holds a model that `save_quantized` wrote."""
    return (folder / LAYERS_FILE).is_file()


def origin_of(folder: Path) -> Origin | None:
    """What the quantized model of a folder was made from, as its manifest says; `None` for any other folder."""
    if not holds_quantized(folder) or not (folder / MANIFEST).is_file():
        return None
    return Artifact.load(folder).manifest.source


def load_quantized(folder: Path, make: Callable[..., torch.nn.Module]) -> torch.nn.Module:
    """Read a model that `save_quantized` wrote.

    Args:
        folder: Where.
        make: Makes the model without its weights; takes `add_pooling_layer=False` where the file has no pooler.

    Raises:
        IntegrityError: The files do not fit the model.
        ExportError: They were written by a newer version.
    """
    from safetensors import safe_open
    from safetensors.torch import load_model

    values = read_json(folder / LAYERS_FILE)
    if values.get("schema") != _SCHEMA:
        raise ExportError(
            f"{folder / LAYERS_FILE} has schema {values.get('schema')!r}; this version reads {_SCHEMA}.",
            fix="update accel-transformers, or quantize the model again.",
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
            made = model.get_submodule(first) if first is not None else _KINDS[settings.pop("kind")](**settings)
            replace_layer(model, name, made)
        missing, unexpected = load_model(model, str(folder / WEIGHTS_FILE), strict=False)
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise IntegrityError(f"{folder} does not fit its config: {error}", fix="quantize the model again.") from error
    if missing or unexpected:
        wrong = sorted((*missing, *unexpected))[:3]
        raise IntegrityError(f"{folder} does not fit its config: {', '.join(wrong)}.", fix="quantize the model again.")
    record = values.get("quantization")
    return model if record is None else with_record(model, build(Quantization, record, str(folder / LAYERS_FILE)))
