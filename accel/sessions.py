"""Opens an artifact: chooses the backend, applies the artifact's own run settings, adds shape buckets."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from . import registry
from .artifact import Artifact, RunRecord
from .buckets import BucketedSession
from .config import SessionOptions
from .errors import ConfigError
from .interfaces import Session
from .specs import BackendSpec, DeviceSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """An artifact's sessions, and what runs them."""

    sessions: Mapping[str, Session]
    backend: BackendSpec
    device: DeviceSpec
    options: SessionOptions


def open_artifact(
    artifact: Artifact,
    *,
    backend: str | None = None,
    device: str | DeviceSpec | None = None,
    provider_options: Mapping[str, object] | None = None,
    options: SessionOptions | None = None,
) -> Opened:
    """Open every component of an artifact.

    What the caller gives wins, then what the artifact was measured with (`run` in its manifest, unless another backend
    is named), then the artifact's dtype and the defaults.

    Raises:
        BackendUnavailableError: Nothing here runs it; the message is the table of everything considered.
        ConfigError: An option that the backend does not have.
        SessionError: The runtime refused the graph.
    """
    run = artifact.manifest.run
    if run is not None and backend is not None and registry.describe(backend).name != run.backend:
        run = None
    spec, where = registry.choose(
        format=artifact.format,
        task=artifact.task,
        dtype=artifact.dtype,
        device=DeviceSpec.parse(device) if isinstance(device, str) else device or _measured_device(run),
        backend=backend or (run.backend if run else None),
    )
    if options is None:
        options = SessionOptions.from_dict(run.session) if run else SessionOptions()
    if provider_options is None:
        provider_options = run.provider_options if run else {}
    if run is not None and options.compute_dtype not in (None, artifact.dtype):
        logger.warning(
            "%s computes in %s, as it was measured (%s). Pass session_options=SessionOptions(compute_dtype=%r) to change it.",
            artifact.path.name, options.compute_dtype, dict(run.measured) or "no accuracy recorded", artifact.dtype,
        )  # fmt: skip
    implementation = registry.load(spec)
    if not options.buckets:
        sessions = implementation.open(artifact, device=where, options=provider_options, session=options)
        return Opened(sessions, spec, where, options)
    for component in artifact.components:
        limit = component.max_sizes.get("sequence")
        if limit is not None and options.buckets[-1] > limit:
            raise ConfigError(
                f"The bucket {options.buckets[-1]} is longer than the model's {limit} positions.",
                fix=f"use buckets up to {limit}.",
            )
    plain = replace(options, buckets=())

    def open_shapes(shapes: Mapping[str, int] | None) -> Mapping[str, Session]:
        return implementation.open(artifact, device=where, options=provider_options, session=plain, shapes=shapes)

    return Opened(BucketedSession.open_all(artifact, open_shapes, options.buckets), spec, where, options)


def _measured_device(run: RunRecord | None) -> DeviceSpec | None:
    return DeviceSpec.parse(run.device) if run else None
