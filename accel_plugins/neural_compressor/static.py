"""Activations and weights in 8 bits: Neural Compressor observes a traced model, and our layers keep the scales that it found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from accel.capture import IntegerLinear, Source, capture_program
from accel.config import QuantizeConfig
from accel.errors import ExportError, QuantizeError

from .library import library, mapped

_FIX = "use backend='cpu' or 'openvino' on an exported graph."
_ALGORITHMS = {"minmax": "minmax", "moving_average": "minmax", "entropy": "kl"}


def static_config(config: QuantizeConfig) -> Any:
    """Neural Compressor's settings for ours: unsigned activations and signed weights, the pair that CPUs multiply fast."""
    granularity = "per_tensor" if config.per_channel is False else "per_channel"
    return library().StaticQuantConfig(
        w_dtype="int8",
        w_sym=True,
        w_granularity=granularity,
        act_dtype="uint8",
        act_sym=False,
        act_algo=_ALGORITHMS[config.calibration],
    )


def traced(source: Source) -> Any:
    """The model as Neural Compressor observes it: a graph module with the source's inputs; for images of the usual size alone where a
    trace for any does not end. What is quantized is the model, which takes images of any size as before.
    """
    try:
        program = capture_program(source)
    except ExportError:
        fixed = source.with_fixed_images()
        if fixed is None:
            raise
        program = capture_program(fixed)
    module: Any = program.module()
    module._exported, module.dynamic_shapes = True, None
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            # It finds layers by this alone with PyTorch 2.11, whose traces do not have it.
            node.meta.setdefault("source_fn_stack", [(node.name, torch.nn.functional.linear)])
    return module


def observed(graph: Any, settings: Any, batches: Iterable[dict[str, torch.Tensor]]) -> Any:
    """The graph module with pairs of quantize and dequantize around what Neural Compressor would round."""
    inc = library()
    with mapped("static-int8", _FIX), torch.no_grad():
        prepared = inc.prepare(graph, settings)
        for batch in batches:
            prepared(**batch)
        return inc.convert(prepared)


def integer_layers(
    converted: Any, model: torch.nn.Module, prefix: str, wanted: Callable[[str], bool]
) -> dict[str, IntegerLinear]:
    """Our layers, by name, with the scales and zero points that stand around a converted graph's products.

    Args:
        converted: From `observed`.
        model: The model whose layers are meant.
        prefix: What the graph puts before the model's names.
        wanted: Whether a layer is to be quantized.

    Raises:
        QuantizeError: There is none.
    """
    found: dict[str, IntegerLinear] = {}
    for node in converted.graph.nodes:
        if node.op != "call_function" or node.target is not torch.ops.aten.linear.default:
            continue
        x, weight = node.args[0], node.args[1]
        if not _is(x, "dequantize_per_tensor") or not _is(weight, "dequantize_per"):
            continue
        name = _name_of(weight, prefix)
        layer = _layer(model, name)
        if layer is None or not wanted(name):
            continue
        made = _integer_layer(converted, layer, x, weight)
        known = found.setdefault(name, made)
        if not torch.equal(known.x_scale, made.x_scale) or not torch.equal(known.x_zero, made.x_zero):
            raise QuantizeError(f"{name} is used twice with different inputs.", fix="leave it in float: exclude=...")
    if not found:
        raise QuantizeError(
            "Neural Compressor found nothing to quantize in the model: no linear layer with constant weights.", fix=_FIX
        )
    return found


def _is(node: Any, word: str) -> bool:
    return getattr(node, "op", "") == "call_function" and word in str(node.target)


def _name_of(weight: Any, prefix: str) -> str:
    """The module that the weights under a dequantization belong to."""
    source = weight.args[0].args[0]
    return str(source.target).removeprefix(prefix).rpartition(".")[0]


def _layer(model: torch.nn.Module, name: str) -> torch.nn.Linear | None:
    try:
        found = model.get_submodule(name)
    except AttributeError:
        return None
    return found if isinstance(found, torch.nn.Linear) else None


def _integer_layer(converted: Any, layer: torch.nn.Linear, x: Any, weight: Any) -> IntegerLinear:
    _, x_scale, x_zero, low, high, _ = x.args
    if (low, high) != (0, 255):
        raise QuantizeError(f"Activations from {low} to {high} are not 8 unsigned bits.", fix=_FIX)
    made = IntegerLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    made.x_scale = torch.tensor(float(_value(converted, x_scale)), dtype=torch.float32)
    made.x_zero = torch.tensor(int(_value(converted, x_zero)), dtype=torch.uint8)
    quantize = weight.args[0]
    scale = torch.as_tensor(_value(converted, quantize.args[1])).detach().float().reshape(-1)
    zero = torch.as_tensor(_value(converted, quantize.args[2])).detach().reshape(-1)
    low, high = quantize.args[-3:-1]
    made.scale = scale.expand(layer.out_features).clone()
    made.zero = zero.to(torch.int8).expand(layer.out_features).clone()
    # As its own operator rounds: quantized_decomposed.quantize_per_channel multiplies by the inverse.
    rounded = torch.round(layer.weight.detach().float() * (1.0 / made.scale)[:, None]) + made.zero[:, None]
    made.weight = rounded.clamp(low, high).to(torch.int8)
    if layer.bias is not None:
        made.bias = layer.bias.detach().float().clone()
    return made


def _value(converted: Any, given: Any) -> Any:
    """A number of a node's arguments, or the tensor that a node gets."""
    if not hasattr(given, "op"):
        return given
    found = converted
    for part in str(given.target).split("."):
        found = getattr(found, part)
    return found
