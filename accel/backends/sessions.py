"""Open a plan: a session for each component of the artifact, with wrappers that pad sequences and store states."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from ..artifact.manifest import Artifact
from ..config import SessionOptions
from ..interfaces.decoder_session_wrappers import continued
from ..interfaces.protocols import OpenRequest, Session
from ..interfaces.required_tokens import with_row_tokens
from ..interfaces.specs import BackendSpec
from . import registry
from .buckets import BucketedSession, RoundedSession
from .plan import Plan
from .probe_checks import checked

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenSessions:
    """The open sessions of an artifact by component, and the plan."""

    plan: Plan
    sessions: Mapping[str, Session]

    @property
    def backend(self) -> BackendSpec:
        """The backend that runs the sessions."""
        assert self.plan.backend is not None
        return self.plan.backend

    @property
    def options(self) -> SessionOptions:
        """Options of the sessions."""
        return self.plan.options

    def close(self) -> None:
        """Close all sessions and release the runtime's memory."""
        for session in self.sessions.values():
            session.close()


def open_plan(
    plan: Plan, *, few_calls: bool = False, states: bool = True, exact: bool = False, probes: bool = True
) -> OpenSessions:
    """Open every component of a plan's artifact.

    The first time on a machine, and again after a change of the processor, the driver, the runtime or the options, the outputs for a few
    inputs are compared with those of PyTorch (`probe_checks`).

    Args:
        plan: The plan.
        few_calls: Whether the sessions are opened for only a few calls, as in a comparison. Backends may then skip
            optimizations that cost memory.
        exact: Whether layers with quantized weights compute in float32.
        states: Whether decoders without a KV cache also get a state. If not, calls run the graph directly.
        probes: Whether the artifact is checked on this machine. Sessions for comparisons (`few_calls`) are never checked.

    Raises:
        BackendUnavailableError: No backend can run the model. The message contains the table of all backends.
        ProbeError: The outputs on this machine differ from those of PyTorch.
        SessionError: The runtime rejected the graph.
    """
    plan.check()
    assert plan.artifact is not None, "the plan's artifact is to be exported first"
    if few_calls or exact or not probes:
        return _open(plan, few_calls=few_calls, states=states, exact=exact)
    return checked(plan, partial(_open, few_calls=False, states=states, exact=False))


def _open(plan: Plan, *, few_calls: bool, states: bool, exact: bool) -> OpenSessions:
    artifact, spec, device, options = plan.artifact, plan.backend, plan.device, plan.options
    assert artifact is not None
    assert spec is not None
    assert device is not None
    logger.info("backend %s on %s for %s (%s)", spec.name, device, plan.format, plan.dtype)
    if plan.run is not None and options.compute_dtype not in (None, artifact.dtype):
        logger.warning(
            "%s computes in %s, because its manifest records this data type as the fastest (measured: %s). To compute in %s, "
            "pass session_options=SessionOptions(compute_dtype=%r).",
            artifact.path.name, options.compute_dtype, dict(plan.run.measured) or "no accuracy recorded", artifact.dtype,
            artifact.dtype,
        )  # fmt: skip
    implementation = registry.load(spec)
    plain = replace(options, buckets=(), pad_to_multiple_of=1)
    artifact = with_row_tokens(artifact) if options.check_inputs else _without_bounds(artifact)

    def open_shapes(shapes: Mapping[str, int] | None) -> Mapping[str, Session]:
        request = OpenRequest(
            device=device,
            options=plan.provider_options,
            session=plain,
            shapes=shapes or {},
            trust_remote_code=plan.model.hub.trust_remote_code,
            few_calls=few_calls,
            exact=exact,
        )
        sessions_by_name = implementation.open(artifact, request)
        return continued(sessions_by_name, artifact.components) if states else sessions_by_name

    versions = registry.probe(spec).versions
    if options.buckets:
        return OpenSessions(plan, BucketedSession.open_all(artifact, open_shapes, options.buckets, versions))
    sessions = open_shapes(None)
    multiple = options.pad_to_multiple_of or 1
    if multiple != 1:
        sessions = RoundedSession.open_all(artifact, sessions, multiple, versions)
    return OpenSessions(plan, sessions)


def _without_bounds(artifact: Artifact) -> Artifact:
    """Return the artifact without bounds and required tokens, so that sessions do not check input values."""
    components = tuple(
        replace(component, inputs=tuple(replace(spec, bounds=None, required=None) for spec in component.inputs))
        for component in artifact.components
    )
    return replace(artifact, manifest=replace(artifact.manifest, components=components))
