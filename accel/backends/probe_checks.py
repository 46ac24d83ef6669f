"""Check an artifact on the machine that runs it: run its probes, and compare the outputs with PyTorch's (ADR 0058).

The check runs when an artifact is opened for the first time under some conditions: processor, device, driver, versions of the runtime,
data type and options. The result is stored in `ACCEL_HOME`, so later openings only read it. If the outputs are wrong, the artifact is
opened in float32 or with fewer graph optimizations, if its outputs are then right and the caller did not choose these settings. Otherwise
opening raises a `ProbeError`, which says what changed since the outputs were right.

Probes run without buckets and without padding to multiples. `capture.fast_path_verification` compares padded calls with unpadded calls.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from .. import progress
from ..artifact.checksums import recall, remember, sha256
from ..artifact.manifest import Artifact
from ..artifact.probe_file import PROBES, SWITCH
from ..config import SessionOptions
from ..errors import ConfigError, InputError, ProbeError, SessionError
from ..interfaces.cpu_features import cpu_flags, processor_name
from . import registry
from .buckets import RoundedSession
from .plan import Plan

if TYPE_CHECKING:
    from ..capture.probes import OutputError, Probes
    from .sessions import OpenSessions

logger = logging.getLogger(__name__)

REMEMBERED = "probes"
"""Folder in `ACCEL_HOME` with the results of checks, a file for each artifact."""

_FLOAT32 = 2e-5
_MARGIN = 20.0  # accepted ratio between the error of a float32 graph here and where it was made
# Accepted error of a quantized graph: the measured error with this factor, or the measured error and this summand.
_QUANTIZED, _QUANTIZED_MORE = 1.5, 0.02
_ELSEWHERE, _ELSEWHERE_MORE = 2.5, 0.05  # the same for another backend, which may quantize activations differently
_ROUNDING = {"float16": 2.0**13, "tf32": 2.0**13, "bfloat16": 2.0**16}  # rounding error relative to that of float32
_MOST = 0.5
_LARGE = 500_000_000  # bytes of an artifact whose probes may take over half a second
# Options that do not change the computed values.
_IRRELEVANT = ("threads", "inter_op_threads", "spinning", "profile", "check_inputs", "buckets", "pad_to_multiple_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Result of the probes of one output on this machine.

    Attributes:
        output: The output, `component/name`.
        difference: Difference from PyTorch, relative to the size of the output.
        tolerance: Largest accepted difference.
    """

    output: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the output is right."""
        return self.difference <= self.tolerance


def conditions_of(plan: Plan) -> dict[str, str]:
    """Return the facts on which the computed values depend: processor, device, versions and settings."""
    spec, device = plan.backend, plan.device
    assert spec is not None
    assert device is not None
    facts = {"backend": spec.name, "device": str(device)}
    if device.name:
        facts["device name"] = device.name
    if device.arch:
        facts["device architecture"] = device.arch
    facts |= {"processor": processor_name(), "processor features": " ".join(cpu_flags())}
    facts |= {name: str(version) for name, version in registry.probe(spec).versions.items()}
    artifact_dtype = plan.artifact.dtype if plan.artifact is not None else plan.dtype
    facts["compute dtype"] = plan.options.compute_dtype or artifact_dtype
    usual = SessionOptions()
    changed = {
        field.name: getattr(plan.options, field.name)
        for field in fields(usual)
        if field.name not in (*_IRRELEVANT, "compute_dtype")
        and getattr(plan.options, field.name) != getattr(usual, field.name)
    }
    options = {**changed, **plan.provider_options}
    if options:
        facts["options"] = json.dumps(options, sort_keys=True, default=_settings_of)
    return facts


def _settings_of(value: Any) -> Any:
    """Return an object of a vendor, such as ONNX Runtime's `SessionOptions`, as JSON values: its public attributes."""
    if isinstance(value, Mapping):
        return dict(value)
    names = [name for name in dir(value) if not name.startswith("_")]
    settings = {name: str(getattr(value, name)) for name in names if not callable(getattr(value, name))}
    return settings or str(value)


def checked(plan: Plan, open_sessions: Callable[[Plan], OpenSessions]) -> OpenSessions:
    """Open a plan, and check the artifact on this machine if this was not done before under the same conditions.

    The first check takes about as long as two calls of 40 tokens. Later openings read a file of about 1 kB.

    Args:
        plan: The plan, with its artifact.
        open_sessions: Function that opens a plan.

    Raises:
        ProbeError: The outputs differ from those of PyTorch.
        IntegrityError: The probes cannot be read.
    """
    artifact, spec = plan.artifact, plan.backend
    assert artifact is not None
    assert spec is not None
    capability = spec.capability("run", artifact.format)
    if capability is not None and not capability.dynamic_shapes:
        return open_sessions(plan)
    if os.environ.get(SWITCH) == "0" or not (artifact.path / PROBES).is_file():
        return open_sessions(plan)
    memory = _Memory(artifact)
    conditions = conditions_of(plan)
    record = memory.passed(conditions)
    if record is not None:
        return open_sessions(_changed(plan, record["changes"], record["why"], artifact))
    from ..capture.probes import read_probes

    probes = read_probes(artifact)
    if probes is None:
        return open_sessions(plan)

    def tried(changes: Mapping[str, Any]) -> tuple[OpenSessions, ProbeResult | None]:
        options = replace(plan.options, **changes)
        changed = plan.with_options(options) if changes else plan
        unpadded = replace(changed, options=replace(options, buckets=())) if options.buckets else changed
        opened = open_sessions(unpadded)
        try:
            worst = _worst(results_of(opened, probes))
        except BaseException:
            opened.close()
            raise
        if not options.buckets:
            return opened, worst
        opened.close()
        return open_sessions(changed), worst

    opened, worst = tried({})
    if worst is None or worst.passed:
        memory.remember(conditions, {}, "")
        return opened
    dtypes = {session.compute_dtype for session in opened.sessions.values()}
    opened.close()
    for changes in _alternatives(plan, dtypes):
        try:
            opened, other = tried(changes)
        except (ConfigError, SessionError):
            continue
        if other is not None and other.passed:
            why = f"differs from PyTorch by {worst.difference:.2g} of its size in the output {worst.output!r} on this machine"
            memory.remember(conditions, changes, why)
            _tell(artifact, changes, why)
            return opened
        opened.close()
    raise _wrong(artifact, worst, conditions, memory.last(), probes.conditions)


def results_of(opened: OpenSessions, probes: Probes) -> list[ProbeResult]:
    """Run the probes with open sessions, and return the result of each output."""
    from ..capture.probes import run_probes

    artifact = opened.plan.artifact
    assert artifact is not None
    if artifact.bytes > _LARGE:
        logger.info("checking %s on this machine: its outputs are compared with those of PyTorch", artifact.path)
        progress.report("checking the outputs on this machine", 0, 1)
    sessions = {
        name: session.plain if isinstance(session, RoundedSession) else session
        for name, session in opened.sessions.items()
    }
    errors: dict[str, OutputError] = {}
    for probe in probes.probes:
        try:
            for output, error in run_probes(sessions, [probe]).items():
                if output not in errors or not error.largest <= errors[output].largest:
                    errors[output] = error
        except (InputError, SessionError) as problem:
            # A fixed size or a missing input. An error is not a wrong output, and calls raise it again.
            logger.debug("a probe of %s does not run: %s", artifact.path, problem)
    if artifact.bytes > _LARGE:
        progress.report("checked the outputs on this machine", 1, 1)
    assert opened.plan.backend is not None
    same_backend = opened.plan.backend.name == probes.conditions.get("backend")
    results = []
    for output, error in errors.items():
        dtype = opened.sessions[output.partition("/")[0]].compute_dtype
        results.append(_judged(output, error, probes.measured.get(output), artifact, dtype, same_backend))
    return results


def _judged(
    output: str, error: OutputError, measured: OutputError | None, artifact: Artifact, dtype: str, same_backend: bool
) -> ProbeResult:
    """Compare the error of an output with the error that is accepted.

    The error where the artifact was made is the error of correct kernels. Other correct kernels add up in another order and so have an
    error of the same size. In other data types, the accepted error is that of `capture.fast_path_verification`.
    """
    from ..capture.fast_path_verification import relative_tolerance

    if artifact.manifest.quantization is not None:
        before = measured.rms if measured is not None else relative_tolerance("", quantized=True)
        factor, more = (_QUANTIZED, _QUANTIZED_MORE) if same_backend else (_ELSEWHERE, _ELSEWHERE_MORE)
        if error.integers:
            more = _MOST
        tolerance = max(factor * before, before + more)
        return ProbeResult(output=output, difference=error.rms, tolerance=tolerance)
    before = measured.largest if measured is not None else 0.0
    if error.integers:
        return ProbeResult(
            output=output, difference=error.largest, tolerance=max(0.1, 2 * before) if dtype == "float32" else _MOST
        )
    if dtype == artifact.dtype == "float32":
        tolerance = max(_FLOAT32, _MARGIN * before)
    else:
        # PyTorch computed the expected outputs of an artifact in half precision in half precision, too.
        floor = max(relative_tolerance(dtype), relative_tolerance(artifact.dtype))
        scaled = before if artifact.dtype == dtype else 2 * before * _ROUNDING.get(dtype, 1.0)
        tolerance = max(floor, min(_MOST, scaled), 4 * before)
    return ProbeResult(output=output, difference=error.largest, tolerance=tolerance)


def _worst(results: list[ProbeResult]) -> ProbeResult | None:
    """Return the output that exceeds its tolerance most."""
    return max(results, key=lambda result: result.difference / (result.tolerance or 1e-30), default=None)


def _alternatives(plan: Plan, dtypes: set[str]) -> Iterator[dict[str, Any]]:
    """Yield changes of options with which the outputs may be right. Settings that the caller chose are not changed."""
    chosen = plan.settings.options
    less_exact = bool(dtypes & _ROUNDING.keys())
    if less_exact and (chosen is None or chosen.compute_dtype is None):
        yield {"compute_dtype": "float32"}
    if plan.options.graph_optimization == "all":
        yield {"graph_optimization": "basic"}
        yield {"graph_optimization": "none"}


def _changed(plan: Plan, changes: Mapping[str, Any], why: str, artifact: Artifact) -> Plan:
    if not changes:
        return plan
    _tell(artifact, changes, why)
    return plan.with_options(replace(plan.options, **changes))


def _tell(artifact: Artifact, changes: Mapping[str, Any], why: str) -> None:
    settings = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    logger.warning("%s is opened with %s, because it %s with the usual settings.", artifact.path, settings, why)


def _wrong(
    artifact: Artifact, worst: ProbeResult, here: Mapping[str, str], right: Mapping[str, Any] | None, where_created: Mapping[str, str]
) -> ProbeError:  # fmt: skip
    component, _, name = worst.output.partition("/")
    before = right["conditions"] if right is not None else where_created
    changes = [
        f"{fact}: {before.get(fact, 'none')} -> {here.get(fact, 'none')}"
        for fact in dict.fromkeys((*before, *here))
        if before.get(fact) != here.get(fact)
    ]
    when = f"on this machine on {right['date']}" if right is not None else "where it was made"
    since = (
        f"Its outputs were right {when}. Changed since then: {'; '.join(changes)}."
        if changes
        else f"Its outputs were right {when}, under the same conditions ({', '.join(f'{k} {v}' for k, v in here.items())})."
    )
    return ProbeError(
        f"{artifact.path} computes wrong outputs on this machine: for the inputs of its probes, the output {name!r} of the graph "
        f"{component!r} differs from PyTorch's by {worst.difference:.3g} of its size, and at most {worst.tolerance:.3g} is "
        f"accepted. {since}",
        fix="use another backend (backend=..., --backend), install the earlier version of what changed, or create the artifact again on "
        f"this machine. {SWITCH}=0 opens it without this check.",
    )


class _Memory:
    """Results of the checks of one artifact, in `ACCEL_HOME`."""

    def __init__(self, artifact: Artifact) -> None:
        recorded = next((record.sha256 for record in artifact.manifest.files if record.name == PROBES), None)
        content = f"{artifact.digest}:{recorded or sha256(artifact.path / PROBES)}"
        self._file = f"{REMEMBERED}/{hashlib.sha256(content.encode()).hexdigest()[:32]}.json"
        self._records = recall(self._file)

    def passed(self, conditions: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the record of a passed check under the same conditions."""
        record = self._records.get(_key(conditions))
        valid = isinstance(record, dict) and record.keys() >= {"changes", "why"} and isinstance(record["changes"], dict)
        return record if valid else None

    def last(self) -> dict[str, Any] | None:
        """Return the latest record of a check that passed with the usual settings."""
        records = [r for r in self._records.values() if isinstance(r, dict) and not r.get("changes", True)]
        return records[-1] if records else None

    def remember(self, conditions: Mapping[str, str], changes: Mapping[str, Any], why: str) -> None:
        """Save that the outputs are right with these changes of the options."""
        date = time.strftime("%Y-%m-%d", time.gmtime())
        record = {"conditions": dict(conditions), "changes": dict(changes), "why": why, "date": date}
        remember(self._file, {_key(conditions): record})


def _key(conditions: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:16]
