"""Quantization of ONNX artifacts for ONNX Runtime."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.artifact import Artifact, Component, Quantization, Step, tool_versions
from accel.config import QuantizeConfig
from accel.errors import ConfigError, QuantizeError
from accel.interfaces.protocols import Batches, Evaluate, Feeds

from ..graph.editing import load_graph, write_artifact
from .calibrators import Calibrator, batches_of
from .integer import Rewriter
from .layers import Layer, find_layers, split_excluded
from .presets import DYNAMIC, STATIC, WEIGHT_4, Preset, choose_preset
from .smoothing import grouped, smooth, smoothing_divisors
from .weight_only import quantize_weights, relative_error

logger = logging.getLogger(__name__)


class OrtQuantizer:
    """Makes 8-bit and 4-bit graphs.

    Args:
        backend: Name of the backend that owns it, for the manifest.
        flags: The CPU's flags, asked when a preset is chosen.
    """

    def __init__(self, backend: str, flags: Callable[[], Sequence[str]]) -> None:
        self._backend = backend
        self._flags = flags

    def quantize(
        self,
        artifact: Artifact,
        *,
        config: QuantizeConfig,
        calibration: Batches | None,
        evaluate: Evaluate | None,
        out: Path,
    ) -> Artifact:
        """Write the quantized graphs; see `accel.interfaces.protocols.Quantizer`. Takes seconds, and calibration time for static."""
        preset, why = choose_preset(config.preset, self._flags())
        check(artifact, config, preset, calibration)
        report: dict[str, Any] = {"preset": preset.name, "why": why, "layers": [], "excluded": []}
        models = {component.name: load_graph(artifact, component) for component in artifact.components}
        found = {name: find_layers(model, config.operators) for name, model in models.items()}
        # Of all graphs at once: a pattern names a layer of one of them, and a table of embeddings has none.
        kept, _ = split_excluded([layer for layers in found.values() for layer in layers], config.exclude)
        chosen = {id(layer) for layer in kept}
        excluded: list[str] = []
        for component in artifact.components:
            model = models[component.name]
            layers = [layer for layer in found[component.name] if id(layer) in chosen]
            left = [layer for layer in found[component.name] if id(layer) not in chosen]
            if not layers:
                report["excluded"] += [layer.name for layer in left]
                excluded += [str(layer.node.name) for layer in left]
                continue
            if config.scheme == STATIC:
                assert calibration is not None
                unreachable = [layer for layer in layers if layer.node.graph is not model.graph]
                layers = [layer for layer in layers if layer.node.graph is model.graph]
                left = [*left, *unreachable]
                if not layers:
                    report["excluded"] += [layer.name for layer in left]
                    excluded += [str(layer.node.name) for layer in left]
                    continue
                watched = load_graph(artifact, component)
                batches = batches_of(calibration, component)
                report |= _static(watched, component, layers, config, preset, batches)
            elif config.scheme == DYNAMIC:
                _rewriter(config, preset).dynamic(layers)
            else:
                report |= _weight_only(layers, config)
            passes.RemoveUnusedNodesPass()(model)
            report["layers"] += [layer.name for layer in layers]
            report["excluded"] += [layer.name for layer in left]
            excluded += [str(layer.node.name) for layer in left]
        if not report["layers"]:
            raise QuantizeError(
                "All layers are in the branches of an If, whose activations cannot be calibrated.",
                fix="use scheme='dynamic-int8', or export the original model: `accel export MODEL OUT`.",
            )
        logger.info(
            "%s with the preset %s (%s): %d layers, %d left in float",
            config.scheme,
            preset.name,
            why,
            len(report["layers"]),
            len(report["excluded"]),
        )
        step = Step(
            stage="quantize",
            backend=self._backend,
            config=config.to_dict(),
            versions=tool_versions("onnx_ir", "onnxruntime"),
            report=report,
        )
        record = Quantization(
            scheme=config.scheme,
            preset=preset.name,
            excluded=tuple(excluded),
            calibration=report.get("calibration"),
        )
        return write_artifact(artifact, models, out, step=step, quantization=record)


def check(artifact: Artifact, config: QuantizeConfig, preset: Preset, calibration: Iterable[Feeds] | None) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: Settings that contradict each other.
        QuantizeError: An artifact that cannot be quantized so, or no calibration data for a static scheme.
    """
    scheme = config.scheme
    refused = [
        (
            scheme not in preset.schemes,
            f"The preset {preset.name!r} cannot do {scheme!r}: {preset.why}.",
            f"use the scheme {' or '.join(preset.schemes)}, or another preset.",
        ),
        (
            config.format == "qoperator" and preset.name == "tensorrt",
            "TensorRT reads Q/DQ pairs only.",
            "use format='qdq'.",
        ),
        (
            config.symmetric is False and preset.name == "tensorrt",
            "TensorRT takes symmetric weights only.",
            "leave symmetric=... out.",
        ),
        (
            config.algorithm not in ("rtn", "hqq"),
            f"algorithm={config.algorithm!r} needs another backend; here there are rtn and hqq.",
            "use rtn or hqq.",
        ),
        (
            config.algorithm == "hqq" and config.symmetric is True,
            "hqq moves zero points, which symmetric weights do not have.",
            "leave symmetric=... out, or use rtn.",
        ),
    ]
    for wrong, message, fix in refused:
        if wrong:
            raise ConfigError(message, fix=fix)
    if artifact.dtype != "float32":
        raise QuantizeError(
            f"{artifact.path} is {artifact.dtype}; integer kernels take float32 activations.",
            fix="quantize the float32 artifact that it was made from.",
        )
    if scheme == STATIC and calibration is None:
        raise QuantizeError(
            "A static scheme needs calibration data, and none was given.",
            fix="pass calibration=..., or use scheme='dynamic-int8'.",
        )


def _rewriter(config: QuantizeConfig, preset: Preset) -> Rewriter:
    return Rewriter(
        per_channel=preset.per_channel if config.per_channel is None else config.per_channel,
        symmetric=config.symmetric is not False,
        reduce_range=preset.reduce_range,
    )


def _static(
    watched: ir.Model,
    component: Component,
    layers: Sequence[Layer],
    config: QuantizeConfig,
    preset: Preset,
    calibration: Iterable[Feeds],
) -> dict[str, Any]:
    """Calibrate on `watched`, a second copy of the graph, and rewrite the layers. Returns what the report says of it."""
    report: dict[str, Any] = {}
    names = list(grouped(layers))
    with Calibrator(watched, component, names, calibration, config.samples) as calibrator:
        channels = calibrator.channel_ranges()
        divisors = {}
        if config.smooth_quant is not None:
            divisors = smoothing_divisors(layers, channels, config.smooth_quant)
        ranges = calibrator.ranges(channels, config.calibration, percentile=config.percentile, divisors=divisors)
        report["calibration"] = {"method": config.calibration, "n": calibrator.rows, "seed": config.seed}
    if divisors:
        report["smooth_quant"] = smooth(layers, divisors)
        # A division that became a product of its own gave its layers another activation.
        ranges |= {f"{name}.smoothed": limits for name, limits in ranges.items()}
    rewriter, signed = _rewriter(config, preset), preset.activations == "int8"
    rewrite = rewriter.static if config.format == "qdq" else rewriter.static_operators
    rewrite(layers, ranges, signed=signed)
    return report


def _weight_only(layers: Sequence[Layer], config: QuantizeConfig) -> dict[str, Any]:
    """Put the layers' weights into blocks of 4 or 8 bits. Returns what the report says of it."""
    four = config.scheme == WEIGHT_4
    # Zero points take a twentieth of a decoding step, and steps of least squares lose no more without; `hqq` moves them.
    symmetric = config.symmetric if config.symmetric is not None else not (four and config.algorithm == "hqq")
    bits = [4 if four else 8] * len(layers)
    if four and config.ratio < 1:
        errors = [relative_error(layer, block_size=config.block_size, symmetric=symmetric) for layer in layers]
        order = sorted(range(len(layers)), key=lambda i: errors[i])
        for i in order[max(1, round(config.ratio * len(layers))) :]:
            bits[i] = 8
        # Layers that share a weight have the same error, and the limit may lie between them.
        first: dict[object, int] = {}
        bits = [first.setdefault(layer.weight_key, width) for layer, width in zip(layers, bits, strict=True)]
    algorithm: Literal["rtn", "hqq"] = "hqq" if config.algorithm == "hqq" else "rtn"
    quantize_weights(layers, bits=bits, block_size=config.block_size, symmetric=symmetric, algorithm=algorithm)
    return {"bits": {str(width): bits.count(width) for width in sorted(set(bits))}}
