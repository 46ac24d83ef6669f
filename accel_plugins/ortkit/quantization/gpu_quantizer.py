"""INT8 and FP8 for GPUs: explicit Q/DQ pairs with calibrated, symmetric scales, as TensorRT reads them.

Weights get a scale for each output channel, activations one for each tensor. The graph stays one of ONNX's own operators
and computes the same on every runtime; which of them multiplies in 8 bits is the runtime's business.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.artifact import Artifact, Quantization, Step, tool_versions
from accel.config import QuantizeConfig
from accel.errors import ConfigError, QuantizeError, did_you_mean
from accel.interfaces.protocols import Batches, Evaluate, Feeds

from ..graph.editing import add_initializer, constant, insert_after, load_graph, nodes, root_graph, write_artifact
from .calibrators import Calibrator, batches_of
from .integer import finish
from .layers import OPERATORS, Layer, find_layers, split_excluded

logger = logging.getLogger(__name__)

INT8, FP8 = "static-int8", "static-fp8"
ATTENTION = "Attention"
"""Name in `QuantizeConfig.operators` of the products inside attention, whose operands are both activations."""
_FIRST_OPSET = 19  # float8, and scales that are not float32


@dataclass(frozen=True, slots=True)
class Steps:
    """A type of 8 bits: its name in ONNX, and its largest number."""

    dtype: ir.DataType
    largest: float

    def scale(self, largest: np.ndarray | float) -> np.ndarray:
        """What one step stands for when `largest`, a number or `(channels,)`, must fit; of the same shape, 1 where everything is 0."""
        scale = np.asarray(largest, np.float32) / self.largest
        return np.where(scale > 0, scale, 1.0).astype(np.float32)

    def rounded(self, array: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """An array of any shape in these steps; `scale` broadcasts to its shape."""
        steps = np.clip(array.astype(np.float32) / scale, -self.largest, self.largest)
        rounded: np.ndarray = (np.rint(steps) if self.dtype == ir.DataType.INT8 else steps).astype(self.dtype.numpy())
        return rounded


STEPS = {INT8: Steps(ir.DataType.INT8, 127.0), FP8: Steps(ir.DataType.FLOAT8E4M3FN, 448.0)}


class GpuQuantizer:
    """Makes graphs with Q/DQ pairs.

    Args:
        backend: Name of the backend that owns it, for the manifest.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def quantize(
        self,
        artifact: Artifact,
        *,
        config: QuantizeConfig,
        calibration: Batches | None,
        evaluate: Evaluate | None,
        out: Path,
    ) -> Artifact:
        """Write the quantized graphs; see `accel.interfaces.protocols.Quantizer`. Takes the calibration's time, on the CPU."""
        check(artifact, config, calibration)
        assert calibration is not None
        steps = STEPS[config.scheme]
        models: dict[str, ir.Model] = {}
        report: dict[str, Any] = {"layers": [], "excluded": [], "attention": 0}
        excluded: list[str] = []
        for component in artifact.components:
            model = load_graph(artifact, component)
            opset = model.opset_imports.get("", 0)
            if opset < _FIRST_OPSET:
                raise QuantizeError(
                    f"{component.file} has opset {opset}; these Q/DQ pairs need {_FIRST_OPSET}.",
                    fix=f"export the model with opset={_FIRST_OPSET} or newer.",
                )
            wanted = None if config.operators is None else [o for o in config.operators if o != ATTENTION]
            layers, left = split_excluded(find_layers(model, wanted), config.exclude)
            layers = [layer for layer in layers if layer.node.graph is model.graph]
            products = _products(model) if ATTENTION in (config.operators or ()) else []
            sources = {str(layer.activation.name) for layer in layers}
            sources |= {str(value.name) for node in products for value in node.inputs if value is not None}
            watched = load_graph(artifact, component)
            batches = batches_of(calibration, component)
            with Calibrator(watched, component, sorted(sources), batches, config.samples) as calibrator:
                channels = calibrator.channel_ranges()
                ranges = calibrator.ranges(channels, config.calibration, percentile=config.percentile, divisors={})
                rows = calibrator.rows
            writer = _Writer(steps, ranges, per_channel=config.per_channel is not False)
            for layer in layers:
                writer.layer(layer)
            for node in products:
                writer.product(node)
            passes.RemoveUnusedNodesPass()(model)
            models[component.name] = model
            report["layers"] += [layer.name for layer in layers]
            report["excluded"] += [layer.name for layer in left]
            report["attention"] += len(products)
            report["calibration"] = {"method": config.calibration, "n": rows, "seed": config.seed}
            excluded += [str(layer.node.name) for layer in left]
        logger.info("%s: %d layers, %d left in float", config.scheme, len(report["layers"]), len(report["excluded"]))
        step = Step(
            stage="quantize",
            backend=self._backend,
            config=config.to_dict(),
            versions=tool_versions("onnx_ir", "onnxruntime", "onnxruntime-gpu"),
            report=report,
        )
        record = Quantization(
            scheme=config.scheme, preset="tensorrt", excluded=tuple(excluded), calibration=report["calibration"]
        )
        return write_artifact(artifact, models, out, step=step, quantization=record)


def check(artifact: Artifact, config: QuantizeConfig, calibration: Iterable[Feeds] | None) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: A setting that this scheme does not have.
        QuantizeError: An artifact that cannot be quantized, or no calibration data.
    """
    if config.scheme not in STEPS:
        raise ConfigError(
            f"GPUs are quantized with {' or '.join(STEPS)}, not {config.scheme!r}.{did_you_mean(config.scheme, STEPS)}",
            fix=f"use scheme={INT8!r} or {FP8!r}.",
        )
    for name, fits in {
        "preset": config.preset in ("auto", "tensorrt"),
        "symmetric": config.symmetric is not False,
    }.items():
        if not fits:
            raise ConfigError(
                f"{config.scheme} for GPUs does not take {name}={getattr(config, name)!r}: it writes symmetric Q/DQ pairs.",
                fix=f"leave {name}=... out.",
            )
    known = (*OPERATORS, ATTENTION)
    for operator in config.operators or ():
        if operator not in known:
            raise ConfigError(
                f"{operator!r} cannot be quantized.{did_you_mean(operator, known)}",
                fix=f"use one of {', '.join(known)}.",
            )
    if artifact.dtype not in ("float32", "float16"):
        raise QuantizeError(f"{artifact.path} is {artifact.dtype}.", fix="quantize a float32 or float16 artifact.")
    if calibration is None:
        raise QuantizeError("Activation ranges need calibration data, and none was given.", fix="pass calibration=...")


def _products(model: ir.Model) -> list[ir.Node]:
    """Products of two activations: queries with keys, and what `Softmax` makes with values."""
    return [
        node
        for node in nodes(model, "MatMul")
        if node.graph is model.graph
        and all(value is not None and value.producer() is not None and constant(value) is None for value in node.inputs)
    ]


class _Writer:
    """Puts Q/DQ pairs into a graph; what two layers share (an input, a weight) is quantized once."""

    def __init__(self, steps: Steps, ranges: Mapping[str, tuple[float, float]], *, per_channel: bool) -> None:
        self._steps = steps
        self._ranges = ranges
        self._per_channel = per_channel
        self._pairs: dict[int, ir.Value] = {}
        self._weights: dict[object, ir.Value] = {}

    def layer(self, layer: Layer) -> None:
        node, graph = layer.node, root_graph(layer.node)
        base, key = str(node.name), (layer.weight_key, layer.activation.dtype)
        if key not in self._weights:
            weight = layer.weight()
            scale = self._steps.scale(np.abs(weight).max(axis=0 if self._per_channel else None))
            values = self._steps.rounded(weight, scale)
            stored = add_initializer(graph, f"{base}.weight_quantized", values)
            matrix = self._dequantized(graph, stored, scale, layer.activation, f"{base}.weight", axis=1)
            matrix.outputs[0].shape = ir.Shape(weight.shape)
            graph.insert_before(node, matrix)
            self._weights[key] = matrix.outputs[0]
        operands = [self._pair(layer.activation, graph), self._weights[key]]
        product = ir.node("MatMul", operands, name=f"{base}.product")
        graph.insert_before(node, product)
        finish(layer, product.outputs[0])

    def product(self, node: ir.Node) -> None:
        graph = root_graph(node)
        for position, value in enumerate(node.inputs):
            assert value is not None
            node.replace_input_with(position, self._pair(value, graph))

    def _pair(self, source: ir.Value, graph: ir.Graph) -> ir.Value:
        """An activation after rounding to 8 bits."""
        if id(source) not in self._pairs:
            low, high = self._ranges[str(source.name)]
            scale = self._steps.scale(max(abs(low), abs(high)))
            inputs = [source, *self._scale(graph, str(source.name), scale, source)]
            quantize = ir.node("QuantizeLinear", inputs, name=f"{source.name}.quantize")
            quantize.outputs[0].type, quantize.outputs[0].shape = ir.TensorType(self._steps.dtype), source.shape
            dequantize = self._dequantized(graph, quantize.outputs[0], scale, source, f"{source.name}.dequantize")
            dequantize.outputs[0].shape = source.shape
            insert_after(source, graph, [quantize, dequantize])
            self._pairs[id(source)] = dequantize.outputs[0]
        return self._pairs[id(source)]

    def _dequantized(
        self,
        graph: ir.Graph,
        values: ir.Value,
        scale: np.ndarray,
        like: ir.Value,
        name: str,
        axis: int | None = None,
    ) -> ir.Node:
        attributes = {"axis": axis} if axis is not None and scale.ndim else {}
        node = ir.node("DequantizeLinear", [values, *self._scale(graph, name, scale, like)], attributes, name=name)
        node.outputs[0].type = like.type
        return node

    def _scale(self, graph: ir.Graph, name: str, scale: np.ndarray, like: ir.Value) -> Sequence[ir.Value]:
        """Scale, in the type of what is quantized, and zero point, whose type is that of the steps."""
        dtype = (like.dtype or ir.DataType.FLOAT).numpy()
        zero = np.zeros(scale.shape, self._steps.dtype.numpy())
        return (
            add_initializer(graph, f"{name}.scale", scale.astype(dtype)),
            add_initializer(graph, f"{name}.zero_point", zero),
        )
