"""Quantizers of ONNX artifacts for ONNX Runtime."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from accel.artifact import Artifact, Component, Quantization, Step, tool_versions
from accel.config import QuantizeConfig
from accel.errors import ConfigError, QuantizeError
from accel.interfaces.protocols import Batches, Feeds

from ..graph.editing import load_graph, load_graphs, write_artifact
from ..graph.rewrites import Rewrite
from .calibrators import Calibrator, batches_of
from .integer import IntegerRewriter
from .layers import (
    LOOKUP,
    OPERATORS,
    EmbeddingLookup,
    QuantizableLayer,
    check_operator,
    find_layers,
    find_lookups,
    split_excluded,
)
from .lookups import quantize_lookups
from .presets import DYNAMIC, PRESETS, STATIC, WEIGHT_4, WEIGHT_ONLY, Preset, choose_preset
from .smoothing import grouped, smooth, smoothing_divisors
from .weight_only import BlockMatrix, quantize_weights, relative_error

logger = logging.getLogger(__name__)

CALIBRATED = ("static-int8", "static-fp8")
"""Schemes that need calibration data for the ranges of activations."""


@dataclass(frozen=True, slots=True)
class GraphLayers:
    """The layers of one graph that a quantizer rewrites.

    Attributes:
        artifact: The artifact.
        component: The graph's component.
        layers: The layers, at least one.
        config: The quantization settings.
        calibration: Batches of inputs.
        report: The report of the quantization step; methods add entries to this dictionary.
        matrices: Block-wise quantized weights by the `id` of the layer; methods add entries to this dictionary.
    """

    artifact: Artifact
    component: Component
    layers: Sequence[QuantizableLayer]
    config: QuantizeConfig
    calibration: Batches | None
    report: dict[str, Any]
    matrices: dict[int, BlockMatrix]

    def calibrated(self, names: Sequence[str]) -> tuple[dict[str, tuple[float, float]], Mapping[str, np.ndarray]]:
        """Run the graph on the calibration data.

        Args:
            names: The names of the activations to observe.

        Returns:
            The smallest and the largest value of each activation by name, and the divisors `(channels,)` of smoothed
            activations by name.
        """
        assert self.calibration is not None
        config, divisors = self.config, dict[str, np.ndarray]()
        batches, graph = batches_of(self.calibration, self.component), load_graph(self.artifact, self.component)
        with Calibrator(graph, self.component, names, batches, config.samples) as calibrator:
            channels = calibrator.channel_ranges()
            if config.smooth_quant is not None:
                divisors = smoothing_divisors(self.layers, channels, config.smooth_quant)
            limits = calibrator.ranges(channels, config.calibration, percentile=config.percentile, divisors=divisors)
            self.report["calibration"] = {"method": config.calibration, "n": calibrator.rows, "seed": config.seed}
        return limits, divisors


class GraphQuantizer(ABC):
    """Base class of quantizers that rewrite the products in a model's graphs to fewer bits.

    Args:
        backend: The name of the backend that uses the quantizer, for the manifest.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def quantize(
        self,
        artifact: Artifact,
        *,
        config: QuantizeConfig,
        calibration: Batches | None,
        out: Path,
    ) -> Artifact:
        """Write an artifact with quantized graphs; see `accel.interfaces.protocols.Quantizer`.

        Takes seconds, plus the time of calibration.
        """
        models = load_graphs(artifact)
        step, record = self.rewrite(artifact, models, config=config, calibration=calibration)
        return write_artifact(artifact, models, out, step=step, quantization=record)

    def rewrite(
        self,
        artifact: Artifact,
        models: Mapping[str, ir.Model],
        *,
        config: QuantizeConfig,
        calibration: Batches | None = None,
    ) -> tuple[Step, Quantization]:
        """Quantize the graphs of an artifact in place.

        Args:
            artifact: The artifact; its folder is only read for calibration.
            models: The graphs by component name.
            config: Quantization settings.
            calibration: Inputs for schemes that need the ranges of activations.

        Returns:
            The record of the step, and the record of the quantization.

        Raises:
            ConfigError: Settings contradict each other, or this quantizer does not support them.
            QuantizeError: The artifact cannot be quantized, or calibration data is missing.
        """
        preset, report = self._start(artifact, config, calibration)
        operators = None if config.operators is None else [name for name in config.operators if name in OPERATORS]
        layers = {name: find_layers(model, operators) for name, model in models.items()}
        lookups = self._lookups(models, layers, config)
        # A pattern must match a layer of any graph, not of every graph, so check all graphs together. Some graphs have
        # no layers, for example graphs with only an embedding table.
        candidates: list[QuantizableLayer | EmbeddingLookup] = []
        for component in artifact.components:
            candidates += (*layers[component.name], *lookups.get(component.name, ()))
        chosen_ids = {id(layer) for layer in split_excluded(candidates, config.exclude)[0]}
        matrices: dict[int, BlockMatrix] = {}
        excluded: list[str] = []
        for component in artifact.components:
            model = models[component.name]
            included: list[QuantizableLayer] = []
            skipped: list[QuantizableLayer] = []
            for layer in layers[component.name]:
                # Skip layers in branches of an `If` node: their activations cannot be calibrated.
                reachable = config.scheme not in CALIBRATED or layer.node.graph is model.graph
                (included if id(layer) in chosen_ids and reachable else skipped).append(layer)
            excluded += [str(layer.node.name) for layer in skipped]
            report["layers"] += [layer.name for layer in included]
            report["excluded"] += [layer.name for layer in skipped]
            if included:
                graph_layers = GraphLayers(artifact, component, included, config, calibration, report, matrices)
                Rewrite(config.scheme, partial(self._rewrite, graph_layers)).apply(model)
        if lookups:
            tables = [lookup for ours in lookups.values() for lookup in ours if id(lookup) in chosen_ids]
            bits = quantize_lookups(models, tables, matrices, config)
            every = [lookup for ours in lookups.values() for lookup in ours]
            report["embeddings"] = {lookup.name: bits[id(lookup)] for lookup in every if id(lookup) in bits}
            report["layers"] += [lookup.name for lookup in every if id(lookup) in bits]
            report["excluded"] += [lookup.name for lookup in every if id(lookup) not in bits]
            excluded += [str(lookup.node.name) for lookup in every if id(lookup) not in bits]
        if not report["layers"]:
            raise QuantizeError(
                "All layers of the graph are in the branches of an If node; accel cannot calibrate the activations there.",
                fix="use scheme='dynamic-int8', or export the original model: `accel export MODEL OUT`.",
            )
        counts = len(report["layers"]), len(report["excluded"])
        why = report.get("why", "for TensorRT")
        logger.info(
            "Quantized with the scheme %s and the preset %s (%s): %d layers quantized, %d layers kept in floating point",
            config.scheme,
            preset,
            why,
            *counts,
        )
        step = Step(
            stage="quantize",
            backend=self._backend,
            config=config.to_dict(),
            versions=tool_versions("onnx_ir", "onnxruntime", "onnxruntime-gpu"),
            report=report,
        )
        record = Quantization(
            scheme=config.scheme, preset=preset, excluded=tuple(excluded), calibration=report.get("calibration")
        )
        return step, record

    @abstractmethod
    def _start(
        self, artifact: Artifact, config: QuantizeConfig, calibration: Batches | None
    ) -> tuple[str, dict[str, Any]]:
        """Check the settings; return the preset's name and the first entries of the report.

        Raises:
            ConfigError: Settings contradict each other, or this quantizer does not support them.
            QuantizeError: The artifact cannot be quantized, or calibration data is missing.
        """

    def _lookups(
        self, models: Mapping[str, ir.Model], layers: Mapping[str, Sequence[QuantizableLayer]], config: QuantizeConfig
    ) -> dict[str, list[EmbeddingLookup]]:
        """Return the lookups in embedding tables to quantize, by component name. By default, embedding tables stay in float."""
        return {}

    @abstractmethod
    def _rewrite(self, graph_layers: GraphLayers, model: ir.Model) -> int:
        """Rewrite layers of a graph and return the number of rewritten layers."""


class OrtQuantizer(GraphQuantizer):
    """Quantizer that writes 8-bit and 4-bit graphs for ONNX Runtime.

    Args:
        backend: The name of the backend that uses the quantizer, for the manifest.
        flags: A function that returns the CPU flags, from which the preset is chosen.
    """

    def __init__(self, backend: str, flags: Callable[[], Sequence[str]]) -> None:
        super().__init__(backend)
        self._flags = flags

    def _start(
        self, artifact: Artifact, config: QuantizeConfig, calibration: Batches | None
    ) -> tuple[str, dict[str, Any]]:
        preset, why = choose_preset(config.preset, self._flags())
        for operator in config.operators or ():
            check_operator(operator, (*OPERATORS, LOOKUP) if config.scheme in WEIGHT_ONLY else OPERATORS)
        check(artifact, config, preset, calibration)
        return preset.name, {"preset": preset.name, "why": why, "layers": [], "excluded": []}

    def _lookups(
        self, models: Mapping[str, ir.Model], layers: Mapping[str, Sequence[QuantizableLayer]], config: QuantizeConfig
    ) -> dict[str, list[EmbeddingLookup]]:
        if config.scheme not in WEIGHT_ONLY or (config.operators is not None and LOOKUP not in config.operators):
            return {}
        return find_lookups(models, layers, config.block_size)

    def _rewrite(self, graph_layers: GraphLayers, model: ir.Model) -> int:
        config, layers, report = graph_layers.config, graph_layers.layers, graph_layers.report
        preset = PRESETS[report["preset"]]
        rewriter = IntegerRewriter(
            per_channel=config.per_channel is not False,
            symmetric=config.symmetric is not False,
            reduce_range=preset.reduce_range,
        )
        if config.scheme == DYNAMIC:
            rewriter.dynamic(layers)
        elif config.scheme == STATIC:
            limits, divisors = graph_layers.calibrated(list(grouped(layers)))
            if divisors:
                report["smooth_quant"] = smooth(layers, divisors)
                # Smoothing inserts `Mul` nodes. Layers that read the output of a `Mul` need its range under the new name.
                limits |= {f"{name}.smoothed": low_high for name, low_high in limits.items()}
            rewrite = rewriter.static if config.format == "qdq" else rewriter.static_operators
            rewrite(layers, limits, signed=preset.activations == "int8")
        else:
            graph_layers.matrices.update(_weight_only(layers, config))
            widths = [matrix.bits for matrix in graph_layers.matrices.values()]
            report["bits"] = {str(width): widths.count(width) for width in sorted(set(widths))}
        return len(layers)


def check(artifact: Artifact, config: QuantizeConfig, preset: Preset, calibration: Iterable[Feeds] | None) -> None:
    """Check the settings, the artifact and the calibration data before quantization.

    Raises:
        ConfigError: Settings contradict each other.
        QuantizeError: The artifact cannot be quantized with these settings, or a static scheme has no calibration data.
    """
    scheme, tensorrt = config.scheme, preset.name == "tensorrt"
    if scheme not in preset.schemes:
        raise ConfigError(
            f"The preset {preset.name!r} does not support the scheme {scheme!r}: {preset.why}.",
            fix=f"use the scheme {' or '.join(preset.schemes)}, or another preset.",
        )
    if tensorrt and config.format == "qoperator":
        raise ConfigError(
            "format='qoperator' is not possible with the preset 'tensorrt': TensorRT reads only Q/DQ pairs.",
            fix="use format='qdq'.",
        )
    if tensorrt and config.symmetric is False:
        raise ConfigError(
            "symmetric=False is not possible with the preset 'tensorrt': TensorRT reads only symmetric weights.",
            fix="leave symmetric=... out.",
        )
    if config.algorithm not in ("rtn", "hqq"):
        raise ConfigError(
            f"algorithm={config.algorithm!r} is not available in this backend, which has the algorithms rtn and hqq.",
            fix="use algorithm='rtn' or algorithm='hqq'.",
        )
    if config.algorithm == "hqq" and config.symmetric is True:
        raise ConfigError(
            "algorithm='hqq' optimizes zero points, but symmetric=True stores weights without zero points.",
            fix="leave symmetric=... out, or use algorithm='rtn'.",
        )
    if artifact.dtype != "float32":
        raise QuantizeError(
            f"{artifact.path} is a {artifact.dtype} artifact; the integer kernels on CPUs accept only float32 activations.",
            fix="quantize a float32 artifact of this model.",
        )
    if scheme == STATIC and calibration is None:
        raise QuantizeError(
            f"The scheme {scheme} measures ranges of activations and needs calibration data, but the call has none.",
            fix="pass a file or data set with typical inputs as calibration=..., or use scheme='dynamic-int8'.",
        )


def _weight_only(layers: Sequence[QuantizableLayer], config: QuantizeConfig) -> dict[int, BlockMatrix]:
    """Quantize the layers' weights in blocks of 4 or 8 bits; return the quantized weights by the `id` of the layer."""
    is_4_bit = config.scheme == WEIGHT_4
    # By default, only `hqq` uses zero points. They take 5 % of the time of a decoding step, and least-squares scales
    # without zero points are as accurate.
    symmetric = config.symmetric if config.symmetric is not None else not (is_4_bit and config.algorithm == "hqq")
    bits = [4 if is_4_bit else 8] * len(layers)
    if is_4_bit and config.ratio < 1:
        errors = [relative_error(layer, block_size=config.block_size, symmetric=symmetric) for layer in layers]
        order = sorted(range(len(layers)), key=lambda i: errors[i])
        for i in order[max(1, round(config.ratio * len(layers))) :]:
            bits[i] = 8
        # Layers that share a weight must have the same number of bits, even if the ratio gives them different numbers.
        first_bits: dict[object, int] = {}
        bits = [first_bits.setdefault(layer.weight_key, width) for layer, width in zip(layers, bits, strict=True)]
    algorithm: Literal["rtn", "hqq"] = "hqq" if config.algorithm == "hqq" else "rtn"
    matrices = quantize_weights(
        layers, bits=bits, block_size=config.block_size, symmetric=symmetric, algorithm=algorithm
    )
    return {id(layer): matrix for layer, matrix in zip(layers, matrices, strict=True)}
