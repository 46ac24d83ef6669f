"""INT8 and FP8 quantization for GPUs: explicit Q/DQ pairs with calibrated, symmetric scales, as TensorRT requires.

Weights have one scale for each output channel, and activations have one scale for the whole tensor. The graph contains
only standard ONNX operators and computes the same result on every runtime. The runtime decides which products it
computes in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from accel.artifact import Artifact
from accel.config import QuantizeConfig
from accel.errors import ConfigError, QuantizeError, did_you_mean
from accel.interfaces.protocols import Batches, Feeds

from ..graph.editing import NewNodes, add_initializer, constant, insert_after, nodes, root_graph
from .integer import finish
from .layers import OPERATORS, QuantizableLayer, check_operator
from .quantizer import GraphLayers, GraphQuantizer

INT8, FP8 = "static-int8", "static-fp8"
ATTENTION = "Attention"
"""Name in `QuantizeConfig.operators` for the products inside attention, which multiply two activations."""
_FIRST_OPSET = 19  # Opset 19 added float8, and scales of other data types than float32.


@dataclass(frozen=True, slots=True)
class EightBitType:
    """An 8-bit data type for quantized values.

    Attributes:
        dtype: The ONNX data type.
        largest: The largest number of the data type that quantized values may have.
    """

    dtype: ir.DataType
    largest: float

    def scale(self, largest: np.ndarray | float) -> np.ndarray:
        """Return the scale for values up to `largest`, which is one number or one number for each channel.

        The scale is 1 where `largest` is 0.
        """
        scale = np.asarray(largest, np.float32) / self.largest
        return np.where(scale > 0, scale, 1.0).astype(np.float32)

    def rounded(self, array: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Quantize an array to the data type; `scale` must broadcast to the shape of the array."""
        steps = np.clip(array.astype(np.float32) / scale, -self.largest, self.largest)
        rounded: np.ndarray = (np.rint(steps) if self.dtype == ir.DataType.INT8 else steps).astype(self.dtype.numpy())
        return rounded


STEPS = {INT8: EightBitType(ir.DataType.INT8, 127.0), FP8: EightBitType(ir.DataType.FLOAT8E4M3FN, 448.0)}


class GpuQuantizer(GraphQuantizer):
    """Quantizer that writes graphs with Q/DQ pairs for GPUs. Calibration runs on the CPU."""

    def _start(
        self, artifact: Artifact, config: QuantizeConfig, calibration: Batches | None
    ) -> tuple[str, dict[str, Any]]:
        check(artifact, config, calibration)
        return "tensorrt", {"layers": [], "excluded": [], "attention": 0}

    def _rewrite(self, graph_layers: GraphLayers, model: ir.Model) -> int:
        config, layers, opset = graph_layers.config, graph_layers.layers, model.opset_imports.get("", 0)
        if opset < _FIRST_OPSET:
            raise QuantizeError(
                f"The graph {graph_layers.component.file} has opset {opset}; Q/DQ pairs for GPUs need opset {_FIRST_OPSET} or newer.",
                fix=f"export the model with opset={_FIRST_OPSET} or newer.",
            )
        products = _products(model) if ATTENTION in (config.operators or ()) else []
        sources = {str(layer.activation.name) for layer in layers}
        sources |= {str(value.name) for node in products for value in node.inputs if value is not None}
        limits, _ = graph_layers.calibrated(sorted(sources))
        writer = _Writer(STEPS[config.scheme], limits, per_channel=config.per_channel is not False)
        for layer in layers:
            writer.layer(layer)
        for node in products:
            writer.product(node)
        graph_layers.report["attention"] += len(products)
        return len(layers) + len(products)


def check(artifact: Artifact, config: QuantizeConfig, calibration: Iterable[Feeds] | None) -> None:
    """Check the settings, the artifact and the calibration data before GPU quantization.

    Raises:
        ConfigError: The scheme does not support a setting.
        QuantizeError: The artifact cannot be quantized, or calibration data is missing.
    """
    if config.scheme not in STEPS:
        raise ConfigError(
            f"Quantization for GPUs supports the schemes {' and '.join(STEPS)}, not {config.scheme!r}."
            f"{did_you_mean(config.scheme, STEPS)}",
            fix=f"use scheme={INT8!r} or {FP8!r}.",
        )
    for name, allowed in (("preset", ("auto", "tensorrt")), ("symmetric", (None, True))):
        if getattr(config, name) not in allowed:
            raise ConfigError(
                f"The scheme {config.scheme} for GPUs does not support {name}={getattr(config, name)!r}: it always writes symmetric Q/DQ "
                "pairs, for TensorRT.",
                fix=f"leave {name}=... out.",
            )
    if config.smooth_quant is not None:
        raise ConfigError(
            f"Quantization for GPUs does not support smooth_quant={config.smooth_quant!r}.",
            fix="leave smooth_quant=... out, or quantize with backend='cpu' or 'openvino'.",
        )
    for operator in config.operators or ():
        check_operator(operator, (*OPERATORS, ATTENTION))
    if artifact.dtype not in ("float32", "float16"):
        raise QuantizeError(
            f"{artifact.path} is a {artifact.dtype} artifact; quantization for GPUs needs float32 or float16.",
            fix="quantize a float32 or float16 artifact.",
        )
    if calibration is None:
        raise QuantizeError(
            f"The scheme {config.scheme} measures ranges of activations and needs calibration data, but the call has none.",
            fix="pass a file or data set with typical inputs as calibration=...",
        )


def _products(model: ir.Model) -> list[ir.Node]:
    """Return the `MatMul` nodes with two activations: queries with keys, and softmax output with values."""
    return [
        node
        for node in nodes(model, "MatMul")
        if node.graph is model.graph
        and all(value is not None and value.producer() is not None and constant(value) is None for value in node.inputs)
    ]


class _Writer:
    """Writer of Q/DQ pairs into a graph; an input or a weight that several layers share is quantized once."""

    def __init__(self, steps: EightBitType, ranges: Mapping[str, tuple[float, float]], *, per_channel: bool) -> None:
        self._steps = steps
        self._ranges = ranges
        self._per_channel = per_channel
        self._pairs: dict[int, ir.Value] = {}
        self._weights: dict[object, ir.Value] = {}

    def layer(self, layer: QuantizableLayer) -> None:
        new = NewNodes(root_graph(layer.node), str(layer.node.name))
        key = (layer.weight_key, layer.activation.dtype)
        if key not in self._weights:
            weight = layer.weight()
            scale = self._steps.scale(np.abs(weight).max(axis=0 if self._per_channel else None))
            stored = add_initializer(new.graph, f"{new.name}.weight_quantized", self._steps.rounded(weight, scale))
            axis: dict[str, Any] = {"axis": 1} if scale.ndim else {}
            inputs = [stored, *self._scale(new, scale, layer.activation)]
            self._weights[key] = new.op("DequantizeLinear", *inputs, like=layer.activation, shape=weight.shape, **axis)
        product = new.op("MatMul", self._pair(layer.activation, new.graph), self._weights[key])
        finish(layer, new, product)

    def product(self, node: ir.Node) -> None:
        for position, value in enumerate(node.inputs):
            assert value is not None
            node.replace_input_with(position, self._pair(value, root_graph(node)))

    def _pair(self, source: ir.Value, graph: ir.Graph) -> ir.Value:
        """Return the activation after a Q/DQ pair, which rounds it to 8 bits."""
        if id(source) not in self._pairs:
            low, high = self._ranges[str(source.name)]
            new = NewNodes(graph, str(source.name))
            scale = self._scale(new, self._steps.scale(max(abs(low), abs(high))), source)
            rounded = new.op("QuantizeLinear", source, *scale, like=source, dtype=self._steps.dtype)
            self._pairs[id(source)] = new.op("DequantizeLinear", rounded, *scale, like=source)
            insert_after(source, graph, new.nodes)
        return self._pairs[id(source)]

    def _scale(self, new: NewNodes, scale: np.ndarray, like: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Add a scale in the data type of `like`, and a zero point of 0 in the 8-bit data type; return both constants."""
        dtype = (like.dtype or ir.DataType.FLOAT).numpy()
        zero = np.zeros(scale.shape, self._steps.dtype.numpy())
        return (
            add_initializer(new.graph, f"{new.name}.scale", scale.astype(dtype)),
            add_initializer(new.graph, f"{new.name}.zero_point", zero),
        )
