"""Quantization with NNCF: static int8, and weights alone in 8 or 4 bits."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import openvino as ov

from accel.artifact import (
    Artifact,
    Component,
    Manifest,
    Quantization,
    Step,
    copy_companions,
    record_files,
    tool_versions,
)
from accel.capture import quiet
from accel.config import QuantizeConfig
from accel.errors import ConfigError, QuantizeError, did_you_mean
from accel.interfaces.cpu_features import adds_in_16_bits, cpu_flags
from accel.interfaces.protocols import Batches, Evaluate, Feeds

from . import FORMAT
from .exporter import VERSIONS, write_graph
from .optimizer import refuse_onnx_decoders, refuse_outer_caches
from .runtime import one_line, port_order, read_model
from .state import BEAM_INDEX

_PRESETS = ("auto", "performance", "mixed")
# In the names of nodes that PyTorch's indexing became, as opposed to an embedding.
_INDEXED = "aten.index"
BLOB = "model.blob"
"""A compiled model in place of a graph: what accuracy control hands to `evaluate`."""


class NncfQuantizer:
    """Reads OpenVINO IR or ONNX, writes OpenVINO IR."""

    def quantize(
        self,
        artifact: Artifact,
        *,
        config: QuantizeConfig,
        calibration: Batches | None,
        evaluate: Evaluate | None,
        out: Path,
    ) -> Artifact:
        """Quantize every component; see `accel.interfaces.protocols.Quantizer`. Seconds for encoders, minutes for GPTQ and AWQ."""
        nncf = _nncf()
        _check(config, evaluate)
        refuse_onnx_decoders(artifact)
        refuse_outer_caches(artifact)
        alone = len(artifact.components) == 1
        parts: Mapping[str, Iterable[Feeds]] = getattr(calibration, "parts", {})
        if not alone:
            _check_several(artifact, config, calibration, parts)
        read = {
            component.name: None
            if calibration is None
            else _rows(calibration if alone else parts[component.name], component, config.samples)
            for component in artifact.components
        }
        made = []
        for component in artifact.components:
            model, batches = read_model(artifact, component), read[component.name]
            if config.scheme == "static-int8":
                quantized = _static(nncf, model, artifact, config, batches, evaluate, out)
            else:
                quantized = _weights_only(nncf, model, config, batches)
            made.append(write_graph(quantized, component, out, alone=alone))
        copy_companions(artifact.path, out)
        return Artifact.create(out, _manifest(artifact, config, tuple(made), read[artifact.components[0].name]))


def _check_several(
    artifact: Artifact,
    config: QuantizeConfig,
    calibration: Iterable[Feeds] | None,
    parts: Mapping[str, Iterable[Feeds]],
) -> None:
    """Refuse data of the first of several graphs alone, and a measure inside of NNCF, which has one graph.

    Raises:
        QuantizeError: With what to use instead.
        ConfigError: `max_drop` inside of NNCF.
    """
    names = " and ".join(component.name for component in artifact.components)
    if config.scheme == "static-int8" and config.max_drop is not None:
        raise ConfigError(f"NNCF's max_drop is for one graph, not {names}.", fix="leave max_drop out of the settings.")
    if calibration is not None and set(parts) != {component.name for component in artifact.components}:
        raise QuantizeError(
            f"{config.scheme} with calibration data needs data for each of the graphs {names}.",
            fix="use accel.quantize, which makes them, or weight-int8 without calibration data.",
        )


def _nncf() -> ModuleType:
    """NNCF, imported without its reports to the vendor.

    Raises:
        QuantizeError: It is not installed.
    """
    os.environ.setdefault("NNCF_CI", "1")
    try:
        with quiet():
            import nncf
    except ImportError as error:
        raise QuantizeError(
            f"NNCF, which quantizes for OpenVINO, cannot be imported: {error}.",
            fix='pip install "accel-transformers[openvino]"',
        ) from error
    module: ModuleType = nncf
    return module


def _check(config: QuantizeConfig, evaluate: Evaluate | None) -> None:
    """Refuse settings that NNCF has no counterpart for.

    Raises:
        ConfigError: With what to use instead.
    """
    if config.preset not in _PRESETS:
        raise ConfigError(
            f"NNCF has no preset {config.preset!r}.{did_you_mean(config.preset, _PRESETS)}",
            fix=f"use one of {', '.join(_PRESETS)}.",
        )
    if config.scheme == "static-int8" and config.calibration == "entropy":
        raise ConfigError("NNCF has no entropy calibration.", fix="use minmax, moving_average or percentile.")
    if config.algorithm not in ("rtn", "awq", "gptq"):
        raise ConfigError(f"NNCF has no {config.algorithm.upper()}.", fix="use rtn, awq or gptq.")
    if config.max_drop is not None and evaluate is None:
        raise ConfigError(
            "max_drop needs evaluate=..., which measures the artifact.", fix="pass it, or leave max_drop out."
        )


def _rows(calibration: Iterable[Feeds], component: Component, limit: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Calibration batches as arrays, up to `limit` rows.

    Raises:
        QuantizeError: There are none, or a batch lacks an input.
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
                f"A calibration batch holds {sorted(feeds)}; the graph takes {names}, so {missing} is missing.",
                fix="make the batches with the model's own tokenizer or processor.",
            )
        batch = {name: feeds[name][: limit - rows].detach().cpu().numpy() for name in names}
        kept = len(batch[names[0]])
        if component.stateful:
            # The order of the cache's rows, which no tokenizer makes; NNCF empties the cache before each batch.
            batch[BEAM_INDEX] = np.arange(kept, dtype=np.int32)
        batches.append(batch)
        rows += kept
    if not rows:
        raise QuantizeError("The calibration data is empty.", fix="pass at least a few dozen rows of real inputs.")
    return batches


@contextmanager
def _mapped(nncf: ModuleType, names: Callable[[], list[str]], config: QuantizeConfig) -> Iterator[None]:
    """NNCF's errors as ours.

    Raises:
        QuantizeError: With a close match where a name in `exclude` is none of the graph's nodes.
    """
    try:
        with quiet():
            nncf.set_log_level(40)
            yield
    except nncf.ValidationError as error:
        text = one_line(error)
        if "gnored" in text:
            plain = [name for name in config.exclude if not name.startswith("re:")]
            known = names()
            wrong = next((name for name in plain if name not in known), None)
            close = did_you_mean(wrong, known) if wrong else ""
            raise QuantizeError(
                f"exclude names nodes that the graph does not have: {text}{close}",
                fix="use names of the graph's nodes, or `re:` and a regular expression.",
            ) from error
        raise QuantizeError(f"NNCF refuses: {text}", fix="check the settings.") from error
    except nncf.InvalidGroupSizeError as error:
        raise QuantizeError(
            f"The block size does not divide the weights' channels: {one_line(error)}",
            fix=f"use block_size={config.block_size // 2}, or exclude those layers."
            if config.block_size > 16
            else "exclude those layers, or use weight-int8.",
        ) from error
    except (nncf.InternalError, nncf.UnsupportedModelError, nncf.ParameterNotSupportedError, RuntimeError) as error:
        raise QuantizeError(
            f"NNCF failed: {one_line(error)}", fix="check the settings and the calibration data."
        ) from error


def _ignored(nncf: ModuleType, model: ov.Model, config: QuantizeConfig) -> Any:
    """`exclude` and `operators` as NNCF's ignored scope."""
    have = {node.get_type_name() for node in model.get_ops()}
    types: list[str] = []
    wrong = _wrong_in_8_bits(model) if config.scheme == "static-int8" and config.operators is None else []
    if config.operators is not None:
        unknown = [name for name in config.operators if name not in have]
        if unknown:
            raise ConfigError(
                f"The graph has no operator {unknown[0]!r}.{did_you_mean(unknown[0], have)}",
                fix=f"use some of {', '.join(sorted(have))}.",
            )
        types = sorted(have - set(config.operators) - {"Constant", "Parameter", "Result"})
    named = [name for name in config.exclude if not name.startswith("re:")]
    return nncf.IgnoredScope(
        names=[*named, *wrong, *_saturating(model, config), *_tables(model, config)],
        patterns=[name.removeprefix("re:") for name in config.exclude if name.startswith("re:")],
        types=types,
        validate=not types,
    )


def _wrong_in_8_bits(model: ov.Model) -> list[str]:
    """Convolutions that stay in float unless `operators` names them: grouped ones, and those whose windows do not overlap.

    On processors with AMX, OpenVINO 2026.4 computes both wrong in 8 bits: 0.87 of the largest value off in wav2vec2, 0.57 behind
    one patch convolution of 8 x 8 in SegFormer, a crash in MobileNetV2; 0.02 without AMX. And NNCF measures the inputs of grouped
    ones along the wrong axis where a transpose lies before them.
    """
    return [
        node.get_friendly_name()
        for node in model.get_ops()
        if node.get_type_name() == "GroupConvolution" or (node.get_type_name() == "Convolution" and _is_patches(node))
    ]


def _saturating(model: ov.Model, config: QuantizeConfig) -> list[str]:
    """Products of two activations, which stay in float where sums of 8-bit products have 16 bits: neither side can keep 7 bits.

    Attention in graphs that were made from ONNX; that of PyTorch's is one operator, which is never quantized.
    """
    if config.scheme != "static-int8" or not adds_in_16_bits(cpu_flags()):
        return []
    products = [node for node in model.get_ops() if node.get_type_name() == "MatMul"]
    return [node.get_friendly_name() for node in products if not any(_is_constant(node, side) for side in (0, 1))]


def _tables(model: ov.Model, config: QuantizeConfig) -> list[str]:
    """Lookups by index in constants that no embedding holds, as GPT-J's of sines and cosines: NNCF takes them for embeddings."""
    if not config.scheme.startswith("weight-"):
        return []
    lookups = [node for node in model.get_ops() if node.get_type_name() == "Gather"]
    return [
        node.get_friendly_name() for node in lookups if _INDEXED in node.get_friendly_name() and _is_constant(node, 0)
    ]


def _is_constant(node: Any, side: int) -> bool:
    """Whether an input of a node depends on no input of the model, as weights do behind their conversions."""
    waiting, seen = [node.input_value(side).get_node()], set()
    while waiting:
        one = waiting.pop()
        if one.get_type_name() in ("Parameter", "ReadValue"):
            return False
        if one.get_friendly_name() not in seen:
            seen.add(one.get_friendly_name())
            waiting += [value.get_node() for value in one.input_values()]
    return True


def _is_patches(convolution: ov.Node) -> bool:
    weights = convolution.input_value(1).get_partial_shape()
    if weights.is_dynamic:
        return False
    kernel = list(weights.to_shape())[2:]
    return list(convolution.get_strides()) == kernel and any(size > 1 for size in kernel)


def _static(
    nncf: ModuleType,
    model: ov.Model,
    artifact: Artifact,
    config: QuantizeConfig,
    batches: list[dict[str, Any]] | None,
    evaluate: Evaluate | None,
    out: Path,
) -> ov.Model:
    """Weights and activations in 8 bits, ranges from calibration data.

    Raises:
        QuantizeError: There is no calibration data, or nothing was quantized.
    """
    if batches is None:
        raise QuantizeError(
            "static-int8 needs calibration data: activation ranges made up from random inputs are wrong.",
            fix="pass calibration=..., a hundred rows of real inputs or more; weight-int8 needs none.",
        )
    settings: dict[str, Any] = {
        "subset_size": len(batches),
        "preset": nncf.QuantizationPreset(config.preset if config.preset != "auto" else "mixed"),
        "model_type": nncf.ModelType.TRANSFORMER,
        "ignored_scope": _ignored(nncf, model, config),
    }
    advanced = _advanced(config)
    dataset = nncf.Dataset(batches)
    with _mapped(nncf, lambda: _node_names(model), config):
        if config.max_drop is None:
            quantized = nncf.quantize(model, dataset, advanced_parameters=advanced, **settings)
        else:
            assert evaluate is not None
            quantized = nncf.quantize_with_accuracy_control(
                model,
                dataset,
                nncf.Dataset(batches),
                _validation(artifact, evaluate, out),
                max_drop=config.max_drop,
                advanced_quantization_parameters=advanced,
                **settings,
            )
    if config.max_drop is None and not any(n.get_type_name() == "FakeQuantize" for n in quantized.get_ops()):
        raise QuantizeError(
            "The model holds nothing that static-int8 quantizes.", fix="check exclude=... and operators=..."
        )
    result: ov.Model = quantized
    return result


def _advanced(config: QuantizeConfig) -> Any:
    """NNCF's advanced parameters for ours."""
    from nncf.quantization.advanced_parameters import (
        AdvancedQuantizationParameters,
        AdvancedSmoothQuantParameters,
        OverflowFix,
        QuantizationParameters,
    )
    from nncf.quantization.range_estimator import (
        AggregatorType,
        RangeEstimatorParameters,
        RangeEstimatorParametersSet,
        StatisticsCollectorParameters,
        StatisticsType,
    )

    if config.calibration == "percentile":
        tail = StatisticsCollectorParameters(
            statistics_type=StatisticsType.QUANTILE,
            aggregator_type=AggregatorType.MEAN,
            quantile_outlier_prob=1 - config.percentile / 100,
        )
        ranges = RangeEstimatorParameters(min=tail, max=tail)
    else:
        ranges = getattr(
            RangeEstimatorParametersSet, {"minmax": "MINMAX", "moving_average": "MEAN_MINMAX"}[config.calibration]
        )
    # NNCF's own default is on, with 0.95.
    alpha = -1.0 if config.smooth_quant is None else config.smooth_quant
    weights = None
    if config.per_channel is not None:
        weights = QuantizationParameters(per_channel=config.per_channel)
    return AdvancedQuantizationParameters(
        activations_range_estimator_params=ranges,
        smooth_quant_alphas=AdvancedSmoothQuantParameters(matmul=alpha, convolution=-1.0),
        weights_quantization_params=weights,
        # Weights of 8 bits saturate OpenVINO's sums where they are added in 16: 0.87 of the largest value off in a classifier
        # of Wav2Vec2-Conformer, 0.034 with 7 bits (OpenVINO 2026.4, AVX2).
        overflow_fix=OverflowFix.ENABLE if adds_in_16_bits(cpu_flags()) else OverflowFix.DISABLE,
    )


def _weights_only(
    nncf: ModuleType, model: ov.Model, config: QuantizeConfig, batches: list[dict[str, Any]] | None
) -> ov.Model:
    """Weights in 8 or 4 bits, computation in the artifact's dtype.

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
        needs = [
            word
            for word, on in (("gptq", config.algorithm == "gptq"), ("scale_estimation", config.scale_estimation))
            if on
        ]
        if needs and batches is None:
            raise QuantizeError(f"{' and '.join(needs)} needs calibration data.", fix="pass calibration=...")
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
    with _mapped(nncf, lambda: _node_names(model), config):
        compressed: ov.Model = nncf.compress_weights(model, **settings)
    wanted = ("i4", "u4") if four else ("i8", "u8")
    types = [
        n.get_output_element_type(0).get_type_name() for n in compressed.get_ops() if n.get_type_name() == "Constant"
    ]
    if not any(word in wanted for word in types):
        if config.exclude:
            raise QuantizeError(
                f"exclude={list(config.exclude)} leaves no weights that {config.scheme} compresses.",
                fix="name fewer nodes; weights are excluded by the name of their product and by that of their constant (Constant_12).",
            )
        raise QuantizeError(
            f"The model holds no weights that {config.scheme} compresses: matrix products and embeddings with constant "
            "weights.",
            fix="use static-int8.",
        )
    return compressed


def _node_names(model: ov.Model) -> list[str]:
    return [node.get_friendly_name() for node in model.get_ops()]


def _validation(artifact: Artifact, evaluate: Evaluate, out: Path) -> Callable[[Any, Iterable[Any]], tuple[float, Any]]:
    """NNCF's validation function: the caller's measure of an artifact, and the outputs on the rows that NNCF asks for,
    from which it ranks the layers.

    NNCF hands over compiled models only; the artifact that `evaluate` gets holds the compiled model.
    """
    measured: dict[int, tuple[Any, float]] = {}
    names = [spec.name for spec in artifact.components[0].outputs]

    def validate(compiled: ov.CompiledModel, items: Iterable[Mapping[str, Any]]) -> tuple[float, Any]:
        if id(compiled) not in measured:
            with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}-candidate-") as folder:
                # The model is kept so that its id is not given to another.
                measured[id(compiled)] = (compiled, evaluate(_compiled_artifact(artifact, compiled, Path(folder))))
        request = compiled.create_infer_request()
        outputs = []
        for item in items:
            request.reset_state()
            request.infer(dict(item))
            ports = port_order(compiled.outputs, names, "output")
            outputs.append([request.get_output_tensor(port).data.copy() for port in ports])
        return measured[id(compiled)][1], outputs

    return validate


def _compiled_artifact(artifact: Artifact, compiled: ov.CompiledModel, folder: Path) -> Artifact:
    (folder / BLOB).write_bytes(compiled.export_model().getvalue())
    copy_companions(artifact.path, folder)
    component = replace(artifact.components[0], file=BLOB, files=record_files(folder, [BLOB]))
    target = {"device": "CPU", "openvino": ov.__version__}
    return Artifact.create(folder, replace(artifact.manifest, format=FORMAT, components=(component,), target=target))


def _manifest(
    artifact: Artifact,
    config: QuantizeConfig,
    components: tuple[Component, ...],
    batches: list[dict[str, Any]] | None,
) -> Manifest:
    used = batches is not None and (config.scheme == "static-int8" or config.scheme == "weight-int4")
    calibration = None
    if used and batches is not None:
        calibration = {"rows": sum(len(next(iter(batch.values()))) for batch in batches), "seed": config.seed}
    step = Step(
        stage="quantize", backend="openvino", config=config.to_dict(), versions=tool_versions(*VERSIONS),
        parent=artifact.digest,
    )  # fmt: skip
    return replace(
        artifact.manifest,
        format=FORMAT,
        opset=None,
        components=components,
        quantization=Quantization(
            scheme=config.scheme, preset=config.preset, excluded=config.exclude, calibration=calibration
        ),
        steps=(*artifact.manifest.steps, step),
        run=None,
    )
