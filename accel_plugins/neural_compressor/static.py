"""Static int8 quantization. Neural Compressor measures the activations of a traced model, and integer layers of `accel`
store the scales and zero points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch

from accel.capture import IntegerLinear, Source, capture_program
from accel.config import QuantizeConfig
from accel.errors import ExportError, QuantizeError

from .upstream import library, mapped

_FIX = "export the model, and quantize the graph with backend='cpu' or 'openvino'."
_ALGORITHMS = {"minmax": "minmax", "moving_average": "minmax", "entropy": "kl"}


def static_config(config: QuantizeConfig) -> Any:
    """Return Neural Compressor's settings: uint8 activations and int8 weights, which CPUs multiply fast."""
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
    """Trace the model to a graph module for Neural Compressor, with the source's inputs.

    If the trace with dynamic image sizes fails, the model is traced for its usual image size. The quantized model still
    accepts images of any size.
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
            # Neural Compressor finds layers by this metadata entry, which traces of PyTorch 2.11 do not have.
            node.meta.setdefault("source_fn_stack", [(node.name, torch.nn.functional.linear)])
    return module


def observed(graph: Any, settings: Any, batches: Iterable[dict[str, torch.Tensor]]) -> Any:
    """Return the graph module with quantize and dequantize nodes, calibrated on the batches."""
    inc = library()
    with mapped("static-int8", _FIX), torch.no_grad():
        prepared = inc.prepare(graph, settings)
        for batch in batches:
            prepared(**batch)
        return inc.convert(prepared)


def integer_layers(
    converted: Any, model: torch.nn.Module, prefix: str, is_quantized: Callable[[str], bool]
) -> dict[str, IntegerLinear]:
    """Return integer layers by name, with the scales and zero points of a converted graph.

    Args:
        converted: The graph module from `observed`.
        model: The model whose layers are quantized.
        prefix: Prefix of the model's module names in the graph.
        is_quantized: Function that tells by name whether a layer is quantized.

    Raises:
        QuantizeError: No layer is quantized, or a layer is used twice with different inputs.
    """
    layers: dict[str, IntegerLinear] = {}
    for node in converted.graph.nodes:
        if node.op != "call_function" or node.target is not torch.ops.aten.linear.default:
            continue
        x, weight = node.args[0], node.args[1]
        if not _is(x, "dequantize_per_tensor") or not _is(weight, "dequantize_per"):
            continue
        name = _name_of(weight, prefix)
        layer = _layer(model, name)
        if layer is None or not is_quantized(name):
            continue
        integers = _integer_layer(converted, layer, x, weight)
        first = layers.setdefault(name, integers)
        if not torch.equal(first.x_scale, integers.x_scale) or not torch.equal(first.x_zero, integers.x_zero):
            raise QuantizeError(
                f"The model uses the layer {name} twice with different input ranges, but a quantized layer has only one range.",
                fix=f"leave the layer in floating point: exclude=[{name!r}].",
            )
    if not layers:
        raise QuantizeError(
            "Neural Compressor found nothing to quantize: the model has no linear layer with constant weights.",
            fix=_FIX,
        )
    return layers


def _is(node: Any, word: str) -> bool:
    return getattr(node, "op", "") == "call_function" and word in str(node.target)


def _name_of(weight: Any, prefix: str) -> str:
    """Return the name of the module that owns the weights under a dequantize node."""
    source = weight.args[0].args[0]
    return str(source.target).removeprefix(prefix).rpartition(".")[0]


def _layer(model: torch.nn.Module, name: str) -> torch.nn.Linear | None:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    return module if isinstance(module, torch.nn.Linear) else None


def _integer_layer(converted: Any, layer: torch.nn.Linear, x: Any, weight: Any) -> IntegerLinear:
    _, x_scale, x_zero, low, high, _ = x.args
    if (low, high) != (0, 255):
        raise QuantizeError(
            f"Neural Compressor quantized activations to integers from {low} to {high}; expected 0 to 255.", fix=_FIX
        )
    integers = IntegerLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    integers.x_scale = torch.tensor(float(_value(converted, x_scale)), dtype=torch.float32)
    integers.x_zero = torch.tensor(int(_value(converted, x_zero)), dtype=torch.uint8)
    quantize = weight.args[0]
    scale = torch.as_tensor(_value(converted, quantize.args[1])).detach().float().reshape(-1)
    zero = torch.as_tensor(_value(converted, quantize.args[2])).detach().reshape(-1)
    low, high = quantize.args[-3:-1]
    integers.scale = scale.expand(layer.out_features).clone()
    integers.zero = zero.to(torch.int8).expand(layer.out_features).clone()
    # Round like the operator quantized_decomposed.quantize_per_channel, which multiplies by the inverse of the scale.
    rounded = torch.round(layer.weight.detach().float() * (1.0 / integers.scale)[:, None]) + integers.zero[:, None]
    integers.weight = rounded.clamp(low, high).to(torch.int8)
    if layer.bias is not None:
        integers.bias = layer.bias.detach().float().clone()
    return integers


def _value(converted: Any, argument: Any) -> Any:
    """Return the value of a node's argument. An argument is a number, or a node that refers to a tensor of the graph
    module.
    """
    return attrgetter(str(argument.target))(converted) if hasattr(argument, "op") else argument
