"""Quantization with one recipe: no search, no accuracy budget."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import progress
from ..artifact.manifest import Artifact, Component
from ..artifact.writing import check_output, staging
from ..backends import registry
from ..config import QuantizeConfig
from ..data.defaults import with_defaults
from ..errors import ConfigError, QuantizeError
from ..interfaces.protocols import Evaluate, Quantizer
from ..interfaces.specs import WEIGHTS, BackendSpec
from .export import weights_of
from .graph_comparison import warn_of_size
from .resolution import artifact_of, resolve

if TYPE_CHECKING:
    import torch


def quantize(
    artifact: Artifact | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    calibration: Iterable[Mapping[str, torch.Tensor]] | None = None,
    evaluate: Evaluate | None = None,
    backend: str | None = None,
    config: QuantizeConfig | None = None,
    **settings: Any,
) -> Artifact:
    """Rewrite a graph into one with fewer bits.

    Args:
        artifact: The artifact or its folder.
        out: Folder to make.
        calibration: Batches of inputs by name, each of the shape that the graph declares (text: `(batch, sequence)`), for
            schemes that need activation ranges. Its attribute `record`, where it has
            one, says in the manifest what was read.
        evaluate: A measure of an artifact, higher is better, for backends that search with it (`max_drop=`).
        backend: Who quantizes; the owner of the artifact's format when `None`.
        config: How; its fields may also be given as keyword arguments (`scheme="static-int8"`).
        **settings: Fields of `QuantizeConfig`.

    Raises:
        BackendUnavailableError: Nobody quantizes this format with this scheme here.
        QuantizeError: It failed, the artifact is quantized already, or calibration data is missing.
    """
    artifact = quantizable(artifact, backend)
    config = QuantizeConfig.from_dict({**(config.to_dict() if config else {}), **settings})
    if isinstance(calibration, str | os.PathLike | Mapping):
        raise ConfigError(
            f"calibration is a {type(calibration).__name__}, not batches of inputs.",
            fix="pass a list of dictionaries of tensors, or a file of rows to accel.quantize.",
        )
    target = check_output(out, artifact.path)
    if artifact.manifest.quantization is not None:
        raise QuantizeError(
            f"{artifact.path} is quantized already ({artifact.manifest.quantization.scheme}).",
            fix="quantize the artifact that it was made from.",
        )
    spec = registry.owner("quantize", artifact.format, backend, scheme=config.scheme, domains=artifact.domains)
    _check_settings(config, spec)
    quantizer: Quantizer = registry.worker(spec, "quantize")
    started = time.perf_counter()
    with staging(target) as folder:
        progress.report(f"quantizing ({config.scheme})", 0, 1)
        watched = None if calibration is None else _Watched(calibration, artifact.components[0])
        made = quantizer.quantize(artifact, config=config, calibration=watched, evaluate=evaluate, out=folder)
        made = _with_calibration(made, calibration if watched is not None and watched.used else None)
        made = made.with_step(seconds=round(time.perf_counter() - started, 2), parent=artifact.digest)
    progress.report("quantized", 1, 1)
    made = Artifact(Path(target), made.manifest)
    warn_of_size(
        artifact,
        made,
        "Scales and new nodes take more than the weights save, or a weight is stored in both forms, as float embeddings that are "
        "also the last layer: exclude=... leaves a layer in float.",
    )
    return made


def quantizable(model: Artifact | str | os.PathLike[str], backend: str | None) -> Artifact:
    """What a quantizer reads: an artifact, or a transformers folder as it is, where the backend that was named reads PyTorch's
    weights.

    Raises:
        ArtifactNotFoundError: It holds PyTorch weights, and nobody was named who reads them.
    """
    named = registry.describe(backend) if backend is not None else None
    if named is None or named.capability("quantize", WEIGHTS) is None:
        return artifact_of(model)
    resolved = resolve(model)
    return resolved.artifact if resolved.artifact is not None else weights_of(resolved)


def _check_settings(config: QuantizeConfig, spec: BackendSpec) -> None:
    """Refuse settings that the scheme has no use for: they would be ignored without a word.

    Raises:
        ConfigError: With the schemes that have one.
    """
    default = QuantizeConfig()
    changed = [f.name for f in fields(config) if getattr(config, f.name) != getattr(default, f.name)]
    able = [c for c in spec.capabilities if c.stage == "quantize" and config.scheme in c.schemes]
    taken = {name for capability in able for name in capability.takes(config.scheme)}
    for name in changed:
        if name in ("scheme", "samples", "seed") or name in taken:
            continue
        others = sorted({s.scheme for c in spec.capabilities for s in c.settings if name in s.names})
        raise ConfigError(
            f"{config.scheme} of backend {spec.name!r} has no use for {name}={getattr(config, name)!r}.",
            fix=f"leave {name} out{', or use the scheme ' + ' or '.join(others) if others else ''}.",
        )


class _Watched:
    """Calibration batches with the inputs that may be left out, which remember whether the quantizer read them."""

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
                    f"{other!r} of the calibration data is a {type(batch[other]).__name__}, no tensor.",
                    fix="pass batches of tensors, such as a tokenizer makes with return_tensors='pt', or rows in the columns of the "
                    "model's task.",
                )
            yield with_defaults(batch, self._names, self._own_defaults)

    @property
    def parts(self) -> Mapping[str, Iterable[Mapping[str, torch.Tensor]]]:
        """Batches of each graph by component, where whoever made the batches has them; else none."""
        found: Mapping[str, Iterable[Mapping[str, torch.Tensor]]] = getattr(self._batches, "parts", {})
        self.used = self.used or bool(found)
        return found


def _with_calibration(made: Artifact, calibration: object) -> Artifact:
    """The artifact with a record of the calibration data that was read, where the data tells what it is, beside what the
    quantizer says about it.
    """
    record = getattr(calibration, "record", None)
    quantization = made.manifest.quantization
    if record is None or quantization is None:
        return made
    recorded = replace(quantization, calibration={**(quantization.calibration or {}), **record})
    return Artifact.create(made.path, replace(made.manifest, quantization=recorded))
