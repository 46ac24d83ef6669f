"""Quantizer that reads PyTorch weights and writes quantized PyTorch weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accel.artifact import (
    Artifact,
    HubOptions,
    Location,
    Quantization,
    Step,
    copy_companions,
    record_files,
    tool_versions,
)
from accel.capture import (
    Source,
    first_lines,
    load_source,
    read_by_other_code,
    reference,
    save_quantized,
    unwrapped,
    with_record,
)
from accel.config import ExportConfig, QuantizeConfig, matched_layers
from accel.errors import ConfigError, QuantizeError
from accel.interfaces.protocols import Batches
from accel.interfaces.task_registry import task_spec

from .block_call_checks import hidden
from .static import integer_layers, observed, static_config, traced
from .weights import (
    NEEDS_DATA,
    check_algorithm,
    check_blocks,
    quantize_weights,
    share_again,
    weight_config,
    with_block_layers,
    with_weights_of_their_own,
)

_VERSIONS = ("neural-compressor-pt", "torchao", "auto-round", "torch", "transformers")


class CompressorQuantizer:
    """Quantizer that writes models with the integers, scales and zero points that Neural Compressor computed."""

    def quantize(
        self, artifact: Artifact, *, config: QuantizeConfig, calibration: Batches | None, out: Path
    ) -> Artifact:
        """Write the quantized model; see `accel.interfaces.protocols.Quantizer`.

        For encoders, `rtn` and static schemes take seconds. Algorithms that search or train take up to minutes.
        """
        _check(artifact, config, calibration)
        source = _source(artifact)
        batches = list(_rows(calibration, artifact, config.samples)) if calibration is not None else []
        excluded = _excluded(source, config.exclude)
        static = config.scheme == "static-int8"
        if static:
            _check_parts(artifact, source)
            model, layers = _static(source, config, batches, excluded)
        else:
            settings = weight_config(config, excluded, str(artifact.path))
            model, layers = _weights(source, config, settings, batches, excluded)
        rows = sum(len(next(iter(batch.values()))) for batch in batches)
        used = static or config.algorithm in NEEDS_DATA
        record = Quantization(
            scheme=config.scheme,
            preset="" if static else config.algorithm,
            excluded=tuple(excluded),
            calibration={"method": config.calibration, "n": rows, "seed": config.seed} if used and rows else None,
        )
        copy_companions(artifact.path, out)
        files = save_quantized(with_record(model, record), out)
        step = Step(
            stage="quantize",
            backend="neural-compressor",
            config=config.to_dict(),
            versions=tool_versions(*_VERSIONS),
            report={"layers": layers},
        )
        recorded = record_files(out, files)
        components = [replace(component, file=files[0], files=recorded) for component in artifact.components]
        return artifact.after(step, out, components=components, quantization=record)


def _static(
    source: Source, config: QuantizeConfig, batches: Sequence[dict[str, torch.Tensor]], excluded: Sequence[str]
) -> tuple[torch.nn.Module, list[str]]:
    """Return the model with int8 activations and weights, and the names of its quantized layers."""
    batches = [{name: batch[name] for name in source.example if name in batch} for batch in batches]
    _check_calls(source, batches[0])
    try:
        converted = observed(traced(source), static_config(config), batches)
    except QuantizeError:
        # A later batch may contain invalid values. The model's own error about the values is clearer, so raise it instead.
        for batch in batches[1:]:
            _check_calls(source, batch)
        raise
    model: torch.nn.Module = unwrapped(source.model)
    prefix = "model." if source.model is not model else ""
    layers = integer_layers(converted, model, prefix, lambda name: name not in excluded)
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    return model, list(layers)


def _check_parts(artifact: Artifact, source: Source) -> None:
    """Raise if a graph of the artifact has inputs that the calibration would leave out.

    SAM also runs without points. But then the activation ranges of its mask decoder would not be those of real points.

    Raises:
        QuantizeError: A graph reads an input that is neither an input of the traced model nor an output of another graph.
    """
    if task_spec(artifact.task).generates or len(artifact.components) < 2:
        return
    available = {*source.example, *(spec.name for component in artifact.components for spec in component.outputs)}
    for component in artifact.components:
        missing = [spec.name for spec in component.inputs if spec.name not in available]
        if missing:
            raise QuantizeError(
                f"Neural Compressor calibrates the model only with the inputs {', '.join(source.example)}, but the part "
                f"{component.name!r} of {source.architecture} also reads {', '.join(missing)}. So the measured activation ranges would "
                "be wrong.",
                fix="use weight-int8 or weight-int4, which need no calibration data.",
            )


def _check_calls(source: Source, batch: dict[str, torch.Tensor]) -> None:
    """Raise if the model cannot be called with a batch of calibration data.

    The model may need more inputs (an image, audio or points in addition to tokens), or reject values of the batch.

    Raises:
        QuantizeError: The model cannot be called with the batch.
    """
    missing = ", ".join(name for name in source.example if name not in batch)
    why = f"the model also needs {missing}" if missing else ""
    try:
        if not missing:
            reference(source.model, batch)
    # The model's code may raise any exception.
    except Exception as error:  # noqa: BLE001
        why = f"{type(error).__name__}: {first_lines(error)}"
    if why:
        raise QuantizeError(
            f"The model {source.architecture} cannot be called with a batch of the calibration data "
            f"({', '.join(f'{name} of {tuple(value.shape)}' for name, value in batch.items())}): {why}.",
            fix="pass calibration data with all inputs of the model and with valid values, or use weight-int8 or weight-int4, "
            "which need no calibration data.",
        )


def _weights(
    source: Source,
    config: QuantizeConfig,
    settings: Any,
    batches: Sequence[dict[str, torch.Tensor]],
    excluded: Sequence[str],
) -> tuple[torch.nn.Module, list[str]]:
    """Return a copy of the model with weights in 4 or 8 bits, and the names of its quantized layers."""
    inner = unwrapped(source.model)
    before = {name: module for name, module in inner.named_modules() if hasattr(module, "weight")}
    model = with_weights_of_their_own(copy.deepcopy(inner))
    if config.algorithm == "awq":
        check_blocks(inner, config, excluded)
    if config.algorithm in ("awq", "gptq"):
        batches = [row for batch in batches for row in _rows_alone(batch)]
    with hidden(model, excluded if config.algorithm == "gptq" else ()):
        quantized: torch.nn.Module = quantize_weights(model, config, settings, batches)
    names = with_block_layers(quantized, before)
    share_again(quantized, inner)
    return quantized, names


def _source(artifact: Artifact) -> Source:
    recorded = next((step.config for step in artifact.manifest.steps if step.stage == "export"), {})
    config = ExportConfig.from_dict({**recorded, "dtype": "float32", "atol": None})
    location = Location(str(artifact.path), artifact.path)
    return load_source(location, task=artifact.task, config=config, hub=HubOptions(local_files_only=True))


def _check(artifact: Artifact, config: QuantizeConfig, calibration: Batches | None) -> None:
    """Raise if the settings or the calibration data cannot be used.

    Raises:
        ConfigError: Neural Compressor does not support a setting.
        QuantizeError: Calibration data is missing, or the model is not in float32.
    """
    if config.preset != "auto":
        raise ConfigError(
            f"preset is {config.preset!r}, but Neural Compressor has no presets.", fix="leave preset out."
        )
    if artifact.dtype != "float32":
        raise QuantizeError(
            f"The model in {artifact.path} has the data type {artifact.dtype}, but Neural Compressor needs a float32 model.",
            fix="quantize the float32 model.",
        )
    if config.scheme == "static-int8":
        if calibration is None:
            raise QuantizeError(
                "static-int8 needs calibration data, but none was passed. Without real inputs, the measured activation ranges "
                "would be wrong.",
                fix="pass calibration=... (--calibration) with at least a hundred rows of real inputs.",
            )
        if config.calibration == "percentile":
            raise ConfigError(
                "Neural Compressor does not support percentile calibration.",
                fix="use minmax, moving_average or entropy.",
            )
    else:
        check_algorithm(config, calibrated=calibration is not None)


def _rows(calibration: Batches, artifact: Artifact, limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield calibration batches with the model's inputs, up to `limit` rows.

    Raises:
        QuantizeError: There are no rows, or a batch has none of the model's inputs.
    """
    # PyTorch models compute position ids themselves and return all logits, so these inputs are left out.
    names = [spec.name for spec in artifact.components[0].inputs if spec.name not in ("position_ids", "logits_to_keep")]
    rows = 0
    for feeds in calibration:
        if rows >= limit:
            break
        batch = {name: feeds[name][: limit - rows] for name in names if name in feeds}
        if not batch:
            raise QuantizeError(
                f"The calibration data has the inputs {', '.join(feeds) or '(none)'}, but the model needs {', '.join(names)}.",
                fix="pass batches with the model's inputs, or rows with the columns of the model's task.",
            )
        rows += len(next(iter(batch.values())))
        yield batch
    if not rows:
        raise QuantizeError("The calibration data is empty.", fix="pass at least a few dozen rows of real inputs.")


def _rows_alone(batch: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield each row of a batch separately, without its padding.

    AWQ runs single layers and uses the mask of one call for all rows. GPTQ treats padding like tokens.
    """
    mask = batch.get("attention_mask")
    for i in range(len(next(iter(batch.values())))):
        row = {name: tensor[i : i + 1] for name, tensor in batch.items()}
        if mask is not None:
            tokens = mask[i].bool()
            row = {n: t[:, tokens] if batch[n].shape[:2] == mask.shape else t for n, t in row.items()}
        yield row


def _excluded(source: Source, patterns: Sequence[str]) -> list[str]:
    """Return the names of linear layers that stay in floating point.

    These are layers that match a pattern, and layers whose weights are also read by other code of the model.

    Raises:
        ConfigError: A pattern matches no layer.
    """
    layers = {
        name: layer for name, layer in unwrapped(source.model).named_modules() if isinstance(layer, torch.nn.Linear)
    }
    read = read_by_other_code(source.model, source.example)
    names = list(layers)
    chosen = matched_layers(patterns, [(name,) for name in names])
    return [name for i, name in enumerate(names) if i in chosen or layers[name] in read]
