"""Quantize an artifact with one recipe, without a search or an accuracy budget."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import progress
from ..artifact.atomic_folder_writing import check_output, staging
from ..artifact.manifest import CHECKPOINT_METHODS, Artifact, Component
from ..backends import registry
from ..backends.stage_backend_selection import plan_stage
from ..config import QuantizeConfig
from ..data.input_defaults import with_defaults
from ..errors import ConfigError, QuantizeError
from ..interfaces.protocols import Quantizer
from ..interfaces.specs import WEIGHTS, BackendSpec
from .foreign_folders import weights_of
from .graph_comparison import warn_of_size
from .probe_recording import inherit_probes
from .resolution import artifact_of, resolve

if TYPE_CHECKING:
    import torch


def quantize(
    artifact: Artifact | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    calibration: Iterable[Mapping[str, torch.Tensor]] | None = None,
    backend: str | None = None,
    config: QuantizeConfig | None = None,
    **settings: Any,
) -> Artifact:
    """Quantize a graph to fewer bits.

    Args:
        artifact: The artifact or its folder.
        out: The output folder.
        calibration: Batches of inputs by name, in the shapes of the graph (text: `(batch, sequence)`), for schemes that
            need ranges of activations. If the object has an attribute `record`, it is written to the manifest.
        backend: The backend that quantizes. When `None`, the default backend for the artifact's format.
        config: Settings; its fields may also be passed as keyword arguments (`scheme="static-int8"`).
        **settings: Fields of `QuantizeConfig`.

    Raises:
        BackendUnavailableError: No installed backend quantizes this format with this scheme.
        QuantizeError: The quantization failed, the artifact is already quantized, or calibration data is missing.
    """
    config = QuantizeConfig.merged(config, settings)
    artifact = quantizable(artifact, backend, config.scheme)
    if isinstance(calibration, str | os.PathLike | Mapping):
        raise ConfigError(
            f"calibration is a {type(calibration).__name__}, but it must be an iterable of batches.",
            fix="pass a list of dictionaries of tensors, or use accel.quantize, which also accepts a file with rows.",
        )
    target = check_output(out, artifact.path)
    plan = plan_stage("quantize", artifact.format, backend, scheme=config.scheme, domains=artifact.domains)
    check_settings(config, plan.backend)
    quantizer: Quantizer = plan.worker()
    started = time.perf_counter()
    with staging(target) as folder:
        progress.report(f"quantizing ({config.scheme})", 0, 1)
        watched = None if calibration is None else _CalibrationBatches(calibration, artifact.components[0])
        result = quantizer.quantize(artifact, config=config, calibration=watched, out=folder)
        result = _with_calibration(result, calibration if watched is not None and watched.used else None)
        result = inherit_probes(_with_method(result, artifact), artifact)
        result = result.with_step(seconds=round(time.perf_counter() - started, 2), parent=artifact.digest)
    progress.report("quantized", 1, 1)
    result = Artifact(Path(target), result.manifest)
    warn_of_size(
        artifact,
        result,
        "The scales and new nodes need more space than the smaller weights save, or a shared weight is stored both quantized and "
        "in float. To keep a layer in float, pass its name in exclude=...",
    )
    return result


def quantizable(model: Artifact | str | os.PathLike[str], backend: str | None, scheme: str | None = None) -> Artifact:
    """Return the input of a quantizer: an artifact, or a transformers folder if the named backend reads PyTorch
    weights.

    An artifact with the integers of a checkpoint that another tool quantized can be quantized with the same scheme. Then only its other
    layers are quantized.

    Raises:
        ArtifactNotFoundError: The model consists of PyTorch weights, and the backend cannot read them.
        QuantizeError: The model is already quantized.
    """
    named = registry.describe(backend) if backend is not None else None
    if named is None or named.capability("quantize", WEIGHTS) is None:
        artifact = artifact_of(model)
    else:
        resolved = resolve(model)
        artifact = resolved.artifact if resolved.artifact is not None else weights_of(resolved)
    quantization = artifact.manifest.quantization
    if quantization is not None and not (scheme == quantization.scheme and quantization.preset in CHECKPOINT_METHODS):
        raise QuantizeError(
            f"{artifact.path} is already quantized (scheme {quantization.scheme}).",
            fix=f"use scheme={quantization.scheme!r}, which quantizes the layers that are still in float."
            if quantization.preset in CHECKPOINT_METHODS
            else "quantize the float artifact from which it was created.",
        )
    return artifact


def check_settings(config: QuantizeConfig, spec: BackendSpec) -> None:
    """Raise for settings that the scheme does not use, instead of ignoring them silently.

    Raises:
        ConfigError: A setting is not used. The message names the schemes that use it.
    """
    default = QuantizeConfig()
    changed = [f.name for f in fields(config) if getattr(config, f.name) != getattr(default, f.name)]
    able = [c for c in spec.capabilities if c.stage == "quantize" and config.scheme in c.schemes]
    supported = {name for capability in able for name in capability.takes(config.scheme)}
    for name in changed:
        if name in ("scheme", "samples", "seed") or name in supported:
            continue
        others = sorted({s.scheme for c in spec.capabilities for s in c.settings if name in s.names})
        raise ConfigError(
            f"The scheme {config.scheme!r} of the backend {spec.name!r} does not use the setting {name}={getattr(config, name)!r}.",
            fix=f"leave {name} out{', or use the scheme ' + ' or '.join(others) if others else ''}.",
        )


class _CalibrationBatches:
    """Calibration batches with missing inputs set to their defaults. `used` is true after the quantizer has read them."""

    def __init__(self, batches: Iterable[Mapping[str, torch.Tensor]], component: Component) -> None:
        self.used = False
        self._batches = batches
        self._names = tuple(spec.name for spec in component.inputs)
        self._own_defaults = component.own_defaults

    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        self.used = True
        for batch in self._batches:
            other = next((name for name, value in batch.items() if not hasattr(value, "ndim")), None)
            if other is not None:
                raise QuantizeError(
                    f"The input {other!r} of the calibration data is a {type(batch[other]).__name__}, but it must be a tensor.",
                    fix="pass batches of tensors, for example from a tokenizer called with return_tensors='pt', or pass rows with "
                    "the data columns of the task.",
                )
            yield with_defaults(batch, self._names, self._own_defaults)

    @property
    def parts(self) -> Mapping[str, Iterable[Mapping[str, torch.Tensor]]]:
        """Calibration batches of each graph by component, if the calibration data has this attribute."""
        batches_by_graph: Mapping[str, Iterable[Mapping[str, torch.Tensor]]] = getattr(self._batches, "parts", {})
        self.used = self.used or bool(batches_by_graph)
        return batches_by_graph


def _with_method(result: Artifact, parent: Artifact) -> Artifact:
    """Return the artifact with the name of the tool that quantized the checkpoint, if one did."""
    before, after = parent.manifest.quantization, result.manifest.quantization
    if before is None or after is None:
        return result
    return Artifact.create(result.path, replace(result.manifest, quantization=replace(after, preset=before.preset)))


def _with_calibration(result: Artifact, calibration: object) -> Artifact:
    """Return the artifact with a record of its calibration data added to the quantizer's own record, if the data has
    one.
    """
    record = getattr(calibration, "record", None)
    quantization = result.manifest.quantization
    if record is None or quantization is None:
        return result
    recorded = replace(quantization, calibration={**(quantization.calibration or {}), **record})
    return Artifact.create(result.path, replace(result.manifest, quantization=recorded))
