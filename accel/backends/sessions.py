"""Opens an artifact: chooses the backend, applies the artifact's own run settings, adds what pads sequences."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ..artifact.manifest import Artifact, RunRecord
from ..config import SessionOptions, available_processors
from ..errors import ConfigError
from ..interfaces.continuation import continued
from ..interfaces.protocols import OpenRequest, Session
from ..interfaces.specs import BackendSpec, DeviceSpec
from . import registry
from .buckets import BucketedSession, RoundedSession, why_unpadded

logger = logging.getLogger(__name__)

# Of `SessionOptions`, what an artifact's manifest may set; threads within the machine.
_RECORDED = (
    "threads", "inter_op_threads", "compute_dtype", "buckets", "pad_to_multiple_of", "graph_optimization", "spinning"
)  # fmt: skip

_MOST_THREADS = 1024
"""Threads that may be asked for wherever it runs: more than almost every machine has processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How the caller wants a model run; `None` leaves the choice to the artifact and to what is here.

    Attributes:
        backend: Name of a backend.
        device: Where, in `torch.device` words.
        provider_options: The vendor's own options for the device.
        options: The same words for every backend.
    """

    backend: str | None = None
    device: str | None = None
    provider_options: Mapping[str, object] | None = None
    options: SessionOptions | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """An artifact's sessions, and what runs them."""

    sessions: Mapping[str, Session]
    backend: BackendSpec
    device: DeviceSpec
    options: SessionOptions

    def close(self) -> None:
        """Give the runtime's memory back."""
        for session in self.sessions.values():
            session.close()


def open_artifact(
    artifact: Artifact, settings: RunSettings | None = None, *, trust_remote_code: bool = False
) -> Opened:
    """Open every component of an artifact.

    What the caller gives wins, then what the artifact was measured with (`run` in its manifest, unless another backend
    is named), then the artifact's dtype and the defaults.

    Args:
        artifact: What to open.
        settings: What the caller gives.
        trust_remote_code: Run code that comes with a PyTorch model.

    Raises:
        BackendUnavailableError: Nothing here runs it; the message is the table of everything considered.
        ConfigError: An option that the backend does not have, or one that a manifest may not set; more threads than a machine has.
        SessionError: The runtime refused the graph.
    """
    given = settings or RunSettings()
    run = artifact.manifest.run
    if run is not None and given.backend is not None and registry.describe(given.backend).name != run.backend:
        run = None
    spec, where = registry.choose(
        format=artifact.format,
        task=artifact.task,
        dtype=artifact.dtype,
        device=DeviceSpec.parse(given.device) if given.device is not None else _measured_device(run),
        backend=given.backend or (run.backend if run else None),
        domains=artifact.domains,
    )
    options = given.options
    if options is None:
        options = _recorded_options(run, artifact) if run else SessionOptions()
    else:
        _check_threads(options)
    provider_options = given.provider_options
    if provider_options is None:
        provider_options = _recorded_provider_options(run, spec, artifact) if run else {}
    if run is not None and options.compute_dtype not in (None, artifact.dtype):
        logger.warning(
            "%s computes in %s, as it was measured (%s). Pass session_options=SessionOptions(compute_dtype=%r) to change it.",
            artifact.path.name, options.compute_dtype, dict(run.measured) or "no accuracy recorded", artifact.dtype,
        )  # fmt: skip
    implementation = registry.load(spec)
    multiple = _multiple(options, spec, artifact)
    options = replace(options, pad_to_multiple_of=multiple)
    plain = replace(options, buckets=(), pad_to_multiple_of=1)
    if not options.check_inputs:
        artifact = _without_bounds(artifact)

    def open_shapes(shapes: Mapping[str, int] | None) -> Mapping[str, Session]:
        request = OpenRequest(
            device=where,
            options=provider_options,
            session=plain,
            shapes=shapes or {},
            trust_remote_code=trust_remote_code,
        )
        return continued(implementation.open(artifact, request), artifact.components)

    if not options.buckets:
        sessions = open_shapes(None)
        if multiple != 1:
            sessions = RoundedSession.open_all(artifact, sessions, multiple, registry.probe(spec).versions)
        return Opened(sessions, spec, where, options)
    for component in artifact.components:
        limit = component.max_sizes.get("sequence")
        if limit is not None and options.buckets[-1] > limit:
            raise ConfigError(
                f"The bucket {options.buckets[-1]} is longer than the model's {limit} positions.",
                fix=f"use buckets up to {limit}.",
            )
    versions = registry.probe(spec).versions
    return Opened(BucketedSession.open_all(artifact, open_shapes, options.buckets, versions), spec, where, options)


def _check_threads(options: SessionOptions) -> None:
    """Refuse what starting takes a machine down with: runtimes start as many threads as they are told to."""
    most = max(_MOST_THREADS, available_processors())
    for name in ("threads", "inter_op_threads"):
        value = getattr(options, name)
        if value is not None and value > most:
            raise ConfigError(
                f"SessionOptions.{name} is {value}; this process may use {available_processors()} processors.",
                fix="leave it out, or use no more than there are processors.",
            )


def _multiple(options: SessionOptions, spec: BackendSpec, artifact: Artifact) -> int:
    """What lengths are padded to a multiple of: as asked, else what the backend prefers, where sequences can be padded."""
    if options.pad_to_multiple_of is not None:
        return options.pad_to_multiple_of
    if options.buckets or why_unpadded(artifact) is not None:
        return 1
    runs = [c for c in spec.capabilities if c.stage == "run" and c.consumes == artifact.format]
    return max((c.preferred_multiple for c in runs), default=1)


def _without_bounds(artifact: Artifact) -> Artifact:
    """The same for sessions that look at no values."""
    components = tuple(
        replace(component, inputs=tuple(replace(spec, bounds=None, required=None) for spec in component.inputs))
        for component in artifact.components
    )
    return replace(artifact, manifest=replace(artifact.manifest, components=components))


def _measured_device(run: RunRecord | None) -> DeviceSpec | None:
    return DeviceSpec.parse(run.device) if run else None


def _recorded_options(run: RunRecord, artifact: Artifact) -> SessionOptions:
    """How an artifact was measured to run best, on this machine's processors.

    An artifact may come from anybody: of its manifest only what cannot write a file, load a library or take the machine is
    followed.

    Raises:
        ConfigError: It sets something else.
    """
    recorded = SessionOptions.from_dict(run.session)
    default = SessionOptions()
    for field in fields(SessionOptions):
        value = getattr(recorded, field.name)
        if field.name not in _RECORDED and value != getattr(default, field.name):
            raise _not_from_a_manifest(artifact, f"session.{field.name}", value)
    most = available_processors()
    threads = None if recorded.threads is None else min(recorded.threads, most)
    return replace(recorded, threads=threads, inter_op_threads=min(recorded.inter_op_threads, most))


def _recorded_provider_options(run: RunRecord, spec: BackendSpec, artifact: Artifact) -> Mapping[str, object]:
    for name, value in run.provider_options.items():
        if name not in spec.recorded_options:
            raise _not_from_a_manifest(artifact, f"provider_options.{name}", value)
    return run.provider_options


def _not_from_a_manifest(artifact: Artifact, name: str, value: object) -> ConfigError:
    return ConfigError(
        f"The manifest of {artifact.path} sets run.{name} = {str(value)[:200]!r}, which a manifest may not.",
        fix="if you trust it, pass that option yourself (session_options=..., provider_options=...); "
        "session_options=SessionOptions() runs the artifact without what it recorded.",
    )
