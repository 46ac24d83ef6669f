"""Quantization with NNCF: static int8, and weight-only quantization to 8 or 4 bits."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import openvino as ov

from accel.artifact import (
    Artifact,
    Component,
    Quantization,
    Step,
    copy_companions,
    tool_versions,
)
from accel.capture import StreamingError, quiet
from accel.config import QuantizeConfig
from accel.errors import ConfigError, QuantizeError, did_you_mean
from accel.interfaces.cpu_features import adds_in_16_bits, cpu_flags
from accel.interfaces.protocols import Batches, Feeds

from . import FORMAT
from .exporter import VERSIONS, write_graph
from .int8_float_fallback import PRODUCTS, rounded
from .node_names import count_new_nodes, last_number
from .onnx_conversion import refuse_onnx_decoders, refuse_outer_caches
from .runtime import one_line, read_model
from .state import BEAM_INDEX
from .upstream import nncf_library, nncf_parameters

_PRESETS = ("auto", "performance", "mixed")
# Part of the name of nodes that are converted from indexing in PyTorch; embeddings have other names.
_INDEXED = "aten.index"


class NncfQuantizer:
    """Quantizer that reads OpenVINO IR or ONNX and writes OpenVINO IR."""

    def quantize(
        self, artifact: Artifact, *, config: QuantizeConfig, calibration: Batches | None, out: Path
    ) -> Artifact:
        """Quantize every component; see `accel.interfaces.protocols.Quantizer`. Takes seconds for encoders, minutes for
        GPTQ and AWQ.
        """
        nncf = nncf_library()
        _check(config)
        refuse_onnx_decoders(artifact)
        refuse_outer_caches(artifact)
        alone = len(artifact.components) == 1
        parts: Mapping[str, Iterable[Feeds]] = getattr(calibration, "parts", {})
        if not alone:
            _check_parts(artifact, config, calibration, parts)
        read = {
            component.name: None
            if calibration is None
            else _rows(calibration if alone else parts[component.name], component, config.samples)
            for component in artifact.components
        }
        quantize = _static if config.scheme == "static-int8" else _weights_only
        components, report = [], dict[str, Any]()
        for component in artifact.components:
            quantized = quantize(nncf, read_model(artifact, component), config, read[component.name])
            components.append(write_graph(quantized, component, out, alone=alone))
            if alone and config.scheme == "static-int8":
                report["layers"] = _layers(quantized)
        copy_companions(artifact.path, out)
        record = None
        batches = read[artifact.components[0].name]
        if batches is not None and config.scheme != "weight-int8":
            record = {"rows": sum(len(next(iter(batch.values()))) for batch in batches), "seed": config.seed}
        return self.finished(artifact, out, components, config, report=report, calibration=record)

    def check_one_pass(self, config: QuantizeConfig) -> None:
        """Check that each weight can be compressed without the other weights and without calibration data.

        Raises:
            ConfigError: A setting is not supported.
            StreamingError: The algorithm needs more than one weight.
        """
        _check(config)
        if config.algorithm != "rtn" or config.scale_estimation:
            raise StreamingError(
                f"{'scale_estimation' if config.scale_estimation else config.algorithm} does not compress each weight alone.",
                fix="export and quantize the model with two commands.",
            )

    def compress(self, model: ov.Model, config: QuantizeConfig) -> ov.Model:
        """Return the graph with compressed weights; the given graph must not be used afterwards."""
        return _weights_only(nncf_library(), model, config, None)

    def finished(
        self,
        artifact: Artifact,
        out: Path,
        components: Sequence[Component],
        config: QuantizeConfig,
        *,
        report: Mapping[str, Any] | None = None,
        calibration: Mapping[str, Any] | None = None,
    ) -> Artifact:
        """Write the manifest of the quantized graphs.

        Args:
            artifact: The artifact before the quantization.
            out: Folder of the new artifact, complete except for the manifest.
            components: The quantized graphs.
            config: Settings of the quantization.
            report: More facts for the step of the manifest.
            calibration: Record of the calibration data.
        """
        step = Step(
            stage="quantize",
            backend="openvino",
            config=config.to_dict(),
            versions=tool_versions(*VERSIONS),
            report=dict(report or {}),
        )
        quantization = Quantization(
            scheme=config.scheme, preset=config.preset, excluded=config.exclude, calibration=calibration
        )
        return artifact.after(step, out, components=components, format=FORMAT, opset=None, quantization=quantization)


def _check_parts(
    artifact: Artifact,
    config: QuantizeConfig,
    calibration: Iterable[Feeds] | None,
    parts: Mapping[str, Iterable[Feeds]],
) -> None:
    """Raise if the artifact has several graphs and calibration data is missing for one of them.

    Raises:
        QuantizeError: Calibration data of a graph is missing; the message names alternatives.
    """
    names = [component.name for component in artifact.components]
    if calibration is not None and set(parts) != set(names):
        raise QuantizeError(
            f"The model has the graphs {' and '.join(names)}, and {config.scheme} needs calibration data for each graph.",
            fix="use accel.quantize(...), which creates the data of each graph, or use weight-int8 without calibration data.",
        )


def _check(config: QuantizeConfig) -> None:
    """Raise if NNCF does not support a setting.

    Raises:
        ConfigError: A setting is not supported; the message names alternatives.
    """
    if config.preset not in _PRESETS:
        raise ConfigError(
            f"NNCF has no preset {config.preset!r}.{did_you_mean(config.preset, _PRESETS)}",
            fix=f"use one of {', '.join(_PRESETS)}.",
        )
    if config.scheme == "static-int8" and config.calibration == "entropy":
        raise ConfigError("NNCF does not support entropy calibration.", fix="use minmax, moving_average or percentile.")
    if config.algorithm not in ("rtn", "awq", "gptq"):
        raise ConfigError(
            f"NNCF does not support the algorithm {config.algorithm!r}.", fix="use 'rtn', 'awq' or 'gptq'."
        )


def _rows(calibration: Iterable[Feeds], component: Component, limit: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Return calibration batches as arrays, up to `limit` rows.

    Raises:
        QuantizeError: There are no rows, or a batch lacks an input.
    """
    names = [spec.name for spec in component.inputs]
    batches: list[dict[str, np.ndarray[Any, Any]]] = []
    rows = 0
    for feeds in calibration:
        if rows >= limit:
            break
        missing = [name for name in names if name not in feeds]
        if missing:
            raise QuantizeError(
                f"A calibration batch has the inputs {sorted(feeds)}, but the graph requires {names}; {missing} is missing.",
                fix="create the batches with the tokenizer or the processor of the model.",
            )
        batch = {name: feeds[name][: limit - rows].detach().cpu().numpy() for name in names}
        count = len(batch[names[0]])
        if component.stateful:
            # The graph needs the row order of the KV cache as an input, which no tokenizer creates. NNCF clears the
            # cache before each batch.
            batch[BEAM_INDEX] = np.arange(count, dtype=np.int32)
        batches.append(batch)
        rows += count
    if not rows:
        raise QuantizeError("The calibration data is empty.", fix="pass at least a few dozen rows of real inputs.")
    return batches


@contextmanager
def _mapped(nncf: ModuleType, model: ov.Model, config: QuantizeConfig) -> Iterator[None]:
    """Context manager that converts NNCF's errors to errors of `accel`.

    Raises:
        QuantizeError: NNCF failed. If a name in `exclude` is not a node of the graph, the message suggests a similar
            name.
    """
    try:
        with quiet():
            # `nncf.set_log_level` would also change handlers of other libraries, such as those of pytest.
            logging.getLogger(nncf.__name__).setLevel(logging.ERROR)
            yield
    except nncf.ValidationError as error:
        text = one_line(error)
        if "gnored" in text:
            nodes = [node.get_friendly_name() for node in model.get_ops()]
            wrong = next((name for name in config.exclude if not name.startswith("re:") and name not in nodes), None)
            close = did_you_mean(wrong, nodes) if wrong else ""
            raise QuantizeError(
                f"exclude contains names that are not nodes of the graph: {text}{close}",
                fix="use names of the graph's nodes, or `re:` followed by a regular expression.",
            ) from error
        raise QuantizeError(f"NNCF rejects the settings: {text}", fix="correct the quantization settings.") from error
    except nncf.InvalidGroupSizeError as error:
        raise QuantizeError(
            f"The block size {config.block_size} does not divide the number of input channels of some weights: {one_line(error)}",
            fix=f"use block_size={config.block_size // 2}, or exclude these layers: exclude=[...]."
            if config.block_size > 16
            else "exclude these layers (exclude=[...]), or use weight-int8.",
        ) from error
    except (nncf.InternalError, nncf.UnsupportedModelError, nncf.ParameterNotSupportedError, RuntimeError) as error:
        raise QuantizeError(
            f"NNCF failed: {one_line(error)}", fix="check the settings and the calibration data."
        ) from error


def _ignored(nncf: ModuleType, model: ov.Model, config: QuantizeConfig) -> Any:
    """Return NNCF's ignored scope (the nodes that are not quantized) for `exclude` and `operators`."""
    have = {node.get_type_name() for node in model.get_ops()}
    types: list[str] = []
    if config.scheme == "static-int8":
        float_nodes = [*([] if config.operators else _wrong_in_8_bits(model)), *_saturating(model)]
    else:
        float_nodes = _tables(model)
    if config.operators is not None:
        unknown = [name for name in config.operators if name not in have]
        if unknown:
            raise ConfigError(
                f"operators contains {unknown[0]!r}, but the graph has no operator of this type.{did_you_mean(unknown[0], have)}",
                fix=f"use operator types of the graph: {', '.join(sorted(have))}.",
            )
        types = sorted(have - set(config.operators) - {"Constant", "Parameter", "Result"})
    named = [name for name in config.exclude if not name.startswith("re:")]
    return nncf.IgnoredScope(
        names=[*named, *float_nodes],
        patterns=[name.removeprefix("re:") for name in config.exclude if name.startswith("re:")],
        types=types,
        validate=not types,
    )


def _wrong_in_8_bits(model: ov.Model) -> list[str]:
    """Return the names of convolutions that stay in floating point unless `operators` names them.

    These are grouped convolutions and convolutions with windows that do not overlap. On processors with AMX, OpenVINO
    2026.4 computes both wrongly in 8 bits (errors relative to the largest value: 0.87 in wav2vec2; 0.57 after one patch
    convolution of 8 x 8 in SegFormer; a crash in MobileNetV2; 0.02 without AMX). NNCF also measures the inputs of
    grouped convolutions along the wrong axis after a transpose.
    """
    return [
        node.get_friendly_name()
        for node in model.get_ops()
        if node.get_type_name() == "GroupConvolution" or (node.get_type_name() == "Convolution" and _is_patches(node))
    ]


def _saturating(model: ov.Model) -> list[str]:
    """Return the names of matrix products of two activations, if the processor adds int8 products in 16 bits.

    These products stay in floating point. Their sums would saturate, because activations cannot be reduced to 7 bits
    like weights. Attention in graphs from ONNX consists of such products. In graphs from PyTorch, attention is one
    operator, which is never quantized.
    """
    if not adds_in_16_bits(cpu_flags()):
        return []
    products = [node for node in model.get_ops() if node.get_type_name() == "MatMul"]
    return [node.get_friendly_name() for node in products if not any(_is_constant(node, side) for side in (0, 1))]


def _tables(model: ov.Model) -> list[str]:
    """Return the names of lookups in constants that are not embeddings, such as GPT-J's sine and cosine tables. NNCF
    would compress them like embeddings.
    """
    lookups = [node for node in model.get_ops() if node.get_type_name() == "Gather"]
    return [
        node.get_friendly_name() for node in lookups if _INDEXED in node.get_friendly_name() and _is_constant(node, 0)
    ]


def _is_constant(node: Any, side: int) -> bool:
    """Return whether an input of a node does not depend on any input of the model. An example is a weight after its
    conversions.
    """
    waiting, visited = [node.input_value(side).get_node()], set()
    while waiting:
        ancestor = waiting.pop()
        if ancestor.get_type_name() in ("Parameter", "ReadValue"):
            return False
        if ancestor.get_friendly_name() not in visited:
            visited.add(ancestor.get_friendly_name())
            waiting += [value.get_node() for value in ancestor.input_values()]
    return True


def _is_patches(convolution: ov.Node) -> bool:
    weights = convolution.input_value(1).get_partial_shape()
    if weights.is_dynamic:
        return False
    kernel = list(weights.to_shape())[2:]
    return list(convolution.get_strides()) == kernel and any(size > 1 for size in kernel)


def _static(
    nncf: ModuleType, model: ov.Model, config: QuantizeConfig, batches: list[dict[str, Any]] | None
) -> ov.Model:
    """Quantize weights and activations to 8 bits, with ranges from calibration data.

    Raises:
        QuantizeError: There is no calibration data, or nothing was quantized.
    """
    if batches is None:
        raise QuantizeError(
            "static-int8 needs calibration data, but none was passed. Without real inputs, the measured activation ranges would "
            "be wrong.",
            fix="pass calibration=... (--calibration) with at least a hundred rows of real inputs, or use weight-int8, which "
            "needs no calibration data.",
        )
    ignored = _ignored(nncf, model, config)
    with _mapped(nncf, model, config):
        quantized: ov.Model = nncf.quantize(
            model,
            nncf.Dataset(batches),
            subset_size=len(batches),
            preset=nncf.QuantizationPreset(config.preset if config.preset != "auto" else "mixed"),
            model_type=nncf.ModelType.TRANSFORMER,
            ignored_scope=ignored,
            advanced_parameters=_advanced(config),
        )
    if not any(node.get_type_name() == "FakeQuantize" for node in quantized.get_ops()):
        raise QuantizeError(
            "static-int8 quantized no operator of the model.",
            fix="check if exclude=... or operators=... excludes all operators.",
        )
    return quantized


def _layers(model: ov.Model) -> list[str]:
    """Return the names of quantized matrix products and convolutions, as `exclude` accepts them."""
    return [
        node.get_friendly_name()
        for node in model.get_ops()
        if node.get_type_name() in PRODUCTS and rounded(node.input(0)) is not None
    ]


def _advanced(config: QuantizeConfig) -> Any:
    """Translate the quantization config into NNCF's advanced parameters."""
    advanced, estimators = nncf_parameters()
    if config.calibration == "percentile":
        tail = estimators.StatisticsCollectorParameters(
            statistics_type=estimators.StatisticsType.QUANTILE,
            aggregator_type=estimators.AggregatorType.MEAN,
            quantile_outlier_prob=1 - config.percentile / 100,
        )
        ranges = estimators.RangeEstimatorParameters(min=tail, max=tail)
    else:
        ranges = getattr(
            estimators.RangeEstimatorParametersSet,
            {"minmax": "MINMAX", "moving_average": "MEAN_MINMAX"}[config.calibration],
        )
    # The value -1 turns SmoothQuant off. By default, NNCF uses SmoothQuant with the value 0.95.
    alpha = -1.0 if config.smooth_quant is None else config.smooth_quant
    weights = None
    if config.per_channel is not None:
        weights = advanced.QuantizationParameters(per_channel=config.per_channel)
    return advanced.AdvancedQuantizationParameters(
        activations_range_estimator_params=ranges,
        smooth_quant_alphas=advanced.AdvancedSmoothQuantParameters(matmul=alpha, convolution=-1.0),
        weights_quantization_params=weights,
        # If the processor adds int8 products in 16 bits, weights of 8 bits saturate OpenVINO's sums. Measured on a
        # classifier of Wav2Vec2-Conformer (OpenVINO 2026.4, AVX2): the error was 0.87 of the largest value with 8-bit
        # weights, and 0.034 with 7-bit weights.
        overflow_fix=advanced.OverflowFix.ENABLE if adds_in_16_bits(cpu_flags()) else advanced.OverflowFix.DISABLE,
    )


def _weights_only(
    nncf: ModuleType, model: ov.Model, config: QuantizeConfig, batches: list[dict[str, Any]] | None
) -> ov.Model:
    """Quantize only weights, to 8 or 4 bits; computation stays in the artifact's data type.

    Raises:
        QuantizeError: The algorithm needs calibration data, or the model has no weight to compress.
    """
    four = config.scheme == "weight-int4"
    kind = "SYM" if config.symmetric else "ASYM"
    settings: dict[str, Any] = {
        "mode": getattr(nncf.CompressWeightsMode, f"INT{4 if four else 8}_{kind}"),
        "ignored_scope": _ignored(nncf, model, config),
    }
    if four:
        needs = "gptq" if config.algorithm == "gptq" else "scale_estimation" if config.scale_estimation else ""
        if needs and batches is None:
            raise QuantizeError(
                f"{needs} needs calibration data, but none was passed.", fix="pass calibration=... (--calibration)."
            )
        settings |= {
            "ratio": config.ratio,
            "group_size": config.block_size,
            "all_layers": True if config.ratio == 1 else None,
            "awq": config.algorithm == "awq" or None,
            "gptq": config.algorithm == "gptq" or None,
            "scale_estimation": config.scale_estimation or None,
        }
        if batches is not None:
            settings |= {"dataset": nncf.Dataset(batches), "subset_size": len(batches)}
    last = last_number()
    with _mapped(nncf, model, config):
        compressed: ov.Model = nncf.compress_weights(model, **settings)
    count_new_nodes(compressed, last)
    packed = (ov.Type.i4, ov.Type.u4) if four else (ov.Type.i8, ov.Type.u8)
    constants = (node for node in compressed.get_ops() if node.get_type_name() == "Constant")
    if any(node.get_output_element_type(0) in packed for node in constants):
        return compressed
    if config.exclude:
        raise QuantizeError(
            f"{config.scheme} compressed no weights, because exclude={list(config.exclude)} excludes all of them.",
            fix="exclude fewer nodes. A weight is excluded by the name of its product or of its constant, such as Constant_12.",
        )
    raise QuantizeError(
        f"The model has no weights that {config.scheme} can compress, which are constant weights of matrix products and embeddings.",
        fix="use static-int8.",
    )
