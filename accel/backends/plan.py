"""Decide how a model runs: artifact, backend, device and options, or the reasons why it cannot run.

`make_plan` is a pure function of the resolved model, the caller's settings and the installed backends. It opens no session
and writes no file. `accel.stages.export` exports the model of a plan if it is not an artifact yet, and
`accel.backends.sessions` opens the sessions of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from ..artifact.manifest import Artifact, FastestRunSettings
from ..artifact.resolved_model import ResolvedModel
from ..config import ExportConfig, QuantizeConfig, SessionOptions, available_processors
from ..errors import BackendUnavailableError, ConfigError, InputError
from ..interfaces.specs import WEIGHTS, BackendSpec, DeviceSpec, Probe, Reason
from . import registry
from .buckets import why_unpadded
from .registry import Inventory
from .stage_backend_selection import SchemePlan, StagePlan, missing_domains, plan_scheme, plan_stage

# Fields of `SessionOptions` that an artifact's manifest may set. Numbers of threads are limited to the processors of
# this machine.
_RECORDED = (
    "threads", "inter_op_threads", "compute_dtype", "buckets", "pad_to_multiple_of", "graph_optimization", "spinning"
)  # fmt: skip
_MOST_THREADS = 1024
"""Number of threads that accel accepts on every machine, even if the machine has fewer processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPreferences:
    """The caller's settings for running a model. `None` leaves a choice to the artifact and the machine.

    Attributes:
        backend: Name of a backend.
        device: The device, as a `torch.device` string.
        provider_options: Vendor-specific options for the device.
        options: Session options. All backends use the same option names.
    """

    backend: str | None = None
    device: str | None = None
    provider_options: Mapping[str, object] | None = None
    options: SessionOptions | None = None


@dataclass(frozen=True, slots=True)
class ConsideredBackend:
    """A row in the table of considered backends.

    Attributes:
        backend: Name of the backend.
        verdict: `chosen`, `possible` (it would work if named), `rejected`, or `broken` (the plugin cannot be loaded).
        device: The device that the backend would use.
        reasons: The reasons why the backend was not chosen.
    """

    backend: str
    verdict: Literal["chosen", "possible", "rejected", "broken"]
    device: DeviceSpec | None
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen backend and device (`None` if nothing fits), and the table of all backends."""

    backend: str | None
    device: DeviceSpec | None
    table: tuple[ConsideredBackend, ...]

    def __str__(self) -> str:
        width = max((len(row.backend) for row in self.table), default=0)
        lines = []
        for row in self.table:
            why = "; ".join(str(reason) for reason in row.reasons)
            where = f" on {row.device}" if row.device is not None else ""
            lines.append(f"  {row.backend:<{width}}  {row.verdict}{where}{': ' + why if why else ''}")
        return "\n".join(lines) or "  (no backend is installed)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decision about the artifact, backend, device and options with which a model runs.

    Attributes:
        model: The resolved model.
        settings: The caller's settings.
        config: Settings of the export, if the model is not an artifact yet.
        format: The format of the graph that runs.
        dtype: The data type of the graph.
        selection: The chosen backend and device, and the table of all considered backends.
        backend: The backend that runs the model; `None` if there is none.
        exporter: The plan of the export that comes first; `None` for an artifact, and for PyTorch weights that run
            without export.
        artifact: The artifact that runs; `None` until it is exported.
        run: The run settings that the manifest records, if the plan uses them.
        options: Options of the sessions; the caller's options until there is an artifact.
        provider_options: Vendor-specific options for the device.
        quantization: How the export is optimized and quantized; `None` if it is only exported.
        why_not: The error if no backend can run the model. The message contains the table.
    """

    model: ResolvedModel
    settings: RunPreferences
    config: ExportConfig
    format: str
    dtype: str
    selection: Selection
    backend: BackendSpec | None
    exporter: StagePlan | None = None
    artifact: Artifact | None = None
    run: FastestRunSettings | None = None
    options: SessionOptions = SessionOptions()
    provider_options: Mapping[str, object] = field(default_factory=dict)
    quantization: SchemePlan | None = None
    why_not: BackendUnavailableError | None = None

    @property
    def device(self) -> DeviceSpec | None:
        """The device that the model runs on."""
        return self.selection.device

    @property
    def task(self) -> str:
        """The task of the model."""
        return self.model.task

    def quantized(self, quantization: str | QuantizeConfig) -> Plan:
        """Return the plan with a quantization of the export.

        Raises:
            ConfigError: The plan exports nothing.
            BackendUnavailableError: The backend has no such scheme.
        """
        self.check()
        if self.exporter is None or self.artifact is not None or self.backend is None:
            what = "contains an exported graph" if self.artifact is not None else "runs with PyTorch weights"
            raise ConfigError(
                f"quantization={quantization!r} is not possible: {self.model.folder} {what}, and from_pretrained quantizes only what it "
                "exports.",
                fix="quantize the artifact with `accel quantize MODEL OUT`, and load the folder OUT.",
            )
        return replace(self, quantization=plan_scheme(quantization, exporter=self.exporter, backend=self.backend.name))

    def check(self) -> None:
        """Raise if no backend can run the model.

        Raises:
            BackendUnavailableError: No backend can run the model. The message contains the table of all backends.
        """
        if self.why_not is not None:
            raise self.why_not

    def with_artifact(self, artifact: Artifact, inventory: Inventory | None = None) -> Plan:
        """Return the plan for an artifact that was exported for it, with session options for this artifact.

        Raises:
            BackendUnavailableError: The backend cannot run this graph.
            ConfigError: Options do not fit the artifact.
        """
        self.check()
        assert self.backend is not None
        inventory = inventory or registry.inventory()
        run = artifact.manifest.run
        requested_device = _device(self.settings, run) or self.device
        question = SelectionRequest(artifact.format, artifact.task, artifact.dtype, requested_device, artifact.domains)
        reasons, device = _obstacles(self.backend, inventory.probe(self.backend), question, inventory)
        if reasons:
            raise BackendUnavailableError(
                f"The backend {self.backend.name!r} cannot run the exported model in {artifact.path}: "
                f"{'; '.join(reason.message for reason in reasons)}.",
                fix=next((reason.remedy for reason in reasons if reason.remedy), None),
            )
        plan = replace(self, artifact=artifact, dtype=artifact.dtype, selection=replace(self.selection, device=device))
        return _with_options(plan, artifact)

    def with_options(self, options: SessionOptions) -> Plan:
        """Return the plan with other session options."""
        plan = replace(self, settings=replace(self.settings, options=options), options=options)
        return _with_options(plan, self.artifact) if self.artifact is not None else plan

    def __str__(self) -> str:
        if self.artifact is not None and self.format != WEIGHTS:
            artifact = str(self.artifact.path)
        elif self.exporter is not None:
            artifact = f"none yet: exported to {self.format} ({self.dtype}) by {self.exporter.backend.name} and cached at the first load"
        else:
            artifact = "none: PyTorch runs the weights directly" if self.backend is not None else "none"
        usual = SessionOptions().to_dict()
        options = [f"{name}={value!r}" for name, value in self.options.to_dict().items() if value != usual[name]]
        options += [f"{name}={value!r}" for name, value in self.provider_options.items()]
        recorded = " (recorded in the manifest)" if self.run is not None and self.settings.options is None else ""
        runs = (
            f"{self.backend.name} on {self.device}" if self.backend is not None else "no installed backend can run it"
        )
        return (
            f"model     {self.model.id} ({self.model.kind}, {self.task})\n"
            f"artifact  {artifact}\n"
            f"runs on   {runs}\n"
            f"options   {', '.join(options) or 'the defaults'}{recorded}\n"
            f"considered backends for the format {self.format} ({self.dtype}):\n{self.selection}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "model": self.model.id,
            "kind": self.model.kind,
            "task": self.task,
            "format": self.format,
            "dtype": self.dtype,
            "artifact": None if self.artifact is None else str(self.artifact.path),
            "exporter": None if self.exporter is None else self.exporter.backend.name,
            "backend": None if self.backend is None else self.backend.name,
            "device": None if self.device is None else str(self.device),
            "options": self.options.to_dict(),
            "provider_options": dict(self.provider_options),
            "recorded": self.run is not None,
            "why_not": None if self.why_not is None else self.why_not.message,
            "considered": self.selection.table,
        }


def make_plan(
    model: ResolvedModel | Artifact,
    settings: RunPreferences | None = None,
    config: ExportConfig | None = None,
    *,
    inventory: Inventory | None = None,
) -> Plan:
    """Decide how a model runs.

    The caller's settings have priority. Next come the measured settings in the manifest (`run`), unless the caller named
    another backend; then the dtype of the artifact; then the defaults.

    Args:
        model: The result of `resolve`, or an artifact.
        settings: The caller's settings.
        config: Settings of the export, if the model is not an artifact yet.
        inventory: The available backends; the installed backends when `None`.

    Returns:
        The plan. Its `check` raises if no backend can run the model.

    Raises:
        UnknownBackendError: A named backend does not exist.
        ConfigError: Export settings are passed for an exported graph; the backend does not support an option; a
            manifest sets an option that it must not set; or there are more than 1,024 threads and more than one for
            each processor.
        InputError: The model is a module in memory.
    """
    settings, config = settings or RunPreferences(), config or ExportConfig()
    if inventory is None:
        inventory = registry.inventory()
        if settings.backend is None:
            registry.tell_broken()
    resolved = ResolvedModel.of_artifact(model) if isinstance(model, Artifact) else model
    artifact, run = resolved.artifact, None
    named = inventory.spec(settings.backend) if settings.backend is not None else None
    makes: list[str] = []
    if artifact is not None:
        if config != ExportConfig():
            raise ConfigError(
                f"{resolved.folder} contains an exported graph, and export settings cannot change an exported graph.",
                fix="remove the export settings. If the folder also contains PyTorch weights, pass export=True to export again.",
            )
        run = artifact.manifest.run
        if run is not None and named is None:
            named = inventory.spec(run.backend)
        elif run is not None and named is not None and named.name != run.backend:
            run = None
        question = SelectionRequest(
            artifact.format, artifact.task, artifact.dtype, _device(settings, run), artifact.domains
        )
    elif resolved.module is not None:
        raise InputError(
            "A PyTorch module in memory cannot be loaded directly, because it has no folder for its exported graph.",
            fix="export the module first: accel.export(model, out).",
        )
    else:
        # If the named backend cannot export, the default backend for the format exports the model.
        stages = named.capabilities if named is not None else ()
        makes = [c.produces for c in stages if c.stage == "export" and c.produces]
        runs = [c.consumes for c in stages if c.stage == "run" and c.consumes]
        format = makes[0] if makes else runs[0] if runs and "onnx" not in runs else "onnx"
        question = SelectionRequest(format, resolved.task, config.dtype, _device(settings, None))
    selection = select(question, inventory, named)
    plan = Plan(
        model=resolved, settings=settings, config=config, format=question.format, dtype=question.dtype, selection=selection,
        backend=inventory.spec(selection.backend) if selection.backend is not None else None, artifact=artifact, run=run,
        options=settings.options or SessionOptions(), provider_options=settings.provider_options or {},
    )  # fmt: skip
    if plan.backend is None:
        return replace(plan, why_not=_nothing_runs(question, named, selection, inventory))
    if artifact is not None:
        return _with_options(plan, artifact)
    if question.format == WEIGHTS:
        return plan
    owner = named.name if named is not None and makes else None
    return replace(plan, exporter=plan_stage("export", question.format, owner, inventory=inventory))


def _device(settings: RunPreferences, run: FastestRunSettings | None) -> DeviceSpec | None:
    """Return the requested device, or the device that the manifest records. `None` for any device."""
    name = settings.device or (run.device if run is not None else None)
    return DeviceSpec.parse(name) if name is not None else None


# Functions that choose a backend.


@dataclass(frozen=True, slots=True)
class SelectionRequest:
    """A graph to run, and the requested device.

    Attributes:
        format, task, dtype: Format, task and data type of the graph.
        device: The requested device; any device when `None`.
        domains: Domains of the graph's operators; `None` if they are unknown.
    """

    format: str
    task: str
    dtype: str
    device: DeviceSpec | None = None
    domains: Sequence[str] | None = None


def select(question: SelectionRequest, inventory: Inventory, named: BackendSpec | None = None) -> Selection:
    """Choose the backend that runs a graph. This is a pure function.

    A named backend is the only candidate. Without a name, the candidates are the backends whose specs allow automatic
    choice, because they do not change numeric results. The candidate with the highest priority wins. A backend is
    rejected if its runtime lacks an operator domain of the graph.
    """
    chosen: str | None = None
    where: DeviceSpec | None = None
    verdicts = {name: ConsideredBackend(name, "broken", None, (reason,)) for name, reason in inventory.broken.items()}
    # Probing imports vendor libraries. Probe only candidates, by descending priority, until a backend fits.
    for spec in sorted(inventory.specs, key=lambda spec: -spec.priority):
        candidate = spec is named if named is not None else spec.auto and bool(spec.capability("run", question.format))
        is_probed = candidate and chosen is None
        probe = inventory.probe(spec) if is_probed else _declared(spec, inventory)
        reasons, device = _obstacles(spec, probe, question, inventory)
        if reasons:
            verdicts[spec.name] = ConsideredBackend(spec.name, "rejected", None, tuple(reasons))
        elif is_probed:
            chosen, where = spec.name, device
            verdicts[spec.name] = ConsideredBackend(spec.name, "chosen", device, ())
        else:
            why = (
                Reason("not-named", f"the caller chose {named.name!r}")
                if named is not None
                else Reason("lower-priority", "the chosen backend has a higher priority")
                if spec.auto
                else Reason("by-name-only", "it is used only if you name it", f"backend={spec.name!r}")
            )
            verdicts[spec.name] = ConsideredBackend(spec.name, "possible", device, (why,))
    order = [*(spec.name for spec in inventory.specs), *inventory.broken]
    return Selection(chosen, where, tuple(verdicts[name] for name in order))


def _declared(spec: BackendSpec, inventory: Inventory) -> Probe:
    """Return the declared devices of a backend without probing it."""
    missing = inventory.missing(spec)
    if missing:
        return Probe(reasons=(missing,))
    types = {device: None for c in spec.capabilities if c.stage == "run" for device in c.devices}
    return Probe(devices=tuple(DeviceSpec(device) for device in types))


def _obstacles(
    spec: BackendSpec, probe: Probe, question: SelectionRequest, inventory: Inventory
) -> tuple[list[Reason], DeviceSpec | None]:
    """Return all reasons why a backend cannot run a graph, and the device that it would use."""
    reasons: list[Reason] = []
    task, device = question.task, question.device
    capability = spec.capability("run", question.format, task=task)
    if capability is None:
        formats = sorted({c.consumes for c in spec.capabilities if c.stage == "run" and c.consumes})
        runs = f"it runs models in the format {', '.join(formats)}" if formats else "it runs no models"
        reasons.append(Reason("format", f"{runs}, not {question.format}"))
    else:
        if (missing := missing_domains(spec, capability, question.domains, inventory.specs)) is not None:
            reasons.append(missing)
        if question.dtype not in capability.dtypes:
            limitation = (
                f"it does not run {question.dtype} graphs{'' if '*' in capability.tasks else f' of the task {task}'}"
            )
            reasons.append(Reason("dtype", f"{limitation}, only {', '.join(capability.dtypes)}"))
        if not capability.does(task):
            reasons.append(
                _other_format(spec, question.format, task) or Reason("task", f"it does not run the task {task}")
            )
    chosen_device = None
    if not probe.available:
        reasons.extend(probe.reasons or (Reason("no-device", "it found no device that it can use"),))
    elif device is None:
        chosen_device = probe.devices[0]
    else:
        chosen_device = next((d for d in probe.devices if (d.type, d.index) == (device.type, device.index)), None)
        if chosen_device is None:
            have = ", ".join(str(d) for d in probe.devices)
            reasons.append(Reason("device", f"it has no device {device}, only {have}"))
    return reasons, chosen_device


def _other_format(spec: BackendSpec, format: str, task: str) -> Reason | None:
    """Return a reason if the backend runs the task only in other formats; `None` if it does not run the task at all."""
    others = sorted(
        {
            capability.consumes
            for capability in spec.capabilities
            if capability.stage == "run" and capability.consumes and capability.does(task)
        }
    )
    if not others:
        return None
    able = any(capability.stage == "export" and capability.does(task) for capability in spec.capabilities)
    remedy = f"export the model for this backend: `accel export MODEL OUT --backend {spec.name}`" if able else ""
    return Reason("task", f"it runs the task {task} in the format {', '.join(others)}, not {format}", remedy)


def _nothing_runs(
    question: SelectionRequest,
    named: BackendSpec | None,
    selection: Selection,
    inventory: Inventory,
) -> BackendUnavailableError:
    """Return the error with the table of backends, and the first remedy of the named backend, or of any backend."""
    format = question.format
    subject = f"The backend {named.name!r} cannot run" if named is not None else "No installed backend can run"
    rows = [row for row in selection.table if row.verdict != "broken" and (named is None or row.backend == named.name)]
    fix = next((reason.remedy for row in rows for reason in row.reasons if reason.remedy), None)
    others = [spec.name for spec in inventory.specs if spec.capability("run", format)]
    if fix is None and named is not None and others and named.name not in others:
        fix = (
            f"use a backend that runs the format {format} ({', '.join(others)}), or export the PyTorch weights for {named.name}: "
            f"accel.export(model, out, backend={named.name!r}), or export=True in from_pretrained."
        )
    where = f" on {question.device}" if question.device else ""
    return BackendUnavailableError(
        f"{subject} this model (format {format}, {question.dtype}, task {question.task}){where}. Backends that were considered:\n"
        f"{selection}",
        fix=fix or "run `accel doctor` to see the backends and devices of this machine.",
    )


# Functions that check and complete the options of sessions.


def _with_options(plan: Plan, artifact: Artifact) -> Plan:
    """Return the plan with its session options."""
    spec, run, settings = plan.backend, artifact.manifest.run, plan.settings
    assert spec is not None
    if run is not None and run.backend != spec.name and run.backend not in spec.aliases:
        run = None
    options = settings.options
    if options is None:
        options = _recorded_options(run, artifact) if run else SessionOptions()
    else:
        _check_threads(options)
    provider_options = settings.provider_options
    if provider_options is None:
        provider_options = _recorded_provider_options(run, spec, artifact) if run else {}
    options = replace(options, pad_to_multiple_of=_multiple(options, spec, artifact))
    _check_padding(options, artifact)
    return replace(plan, run=run, options=options, provider_options=provider_options)


def _check_padding(options: SessionOptions, artifact: Artifact) -> None:
    """Raise for padding if the model's sequences cannot be padded, and for buckets longer than the model's positions."""
    setting = "buckets" if options.buckets else "pad_to_multiple_of" if options.pad_to_multiple_of != 1 else None
    if setting is not None and (reason := why_unpadded(artifact)) is not None:
        raise ConfigError(
            f"SessionOptions.{setting} pads the sequences, but sequences of this model cannot be padded: {reason}.",
            fix=f"leave {setting} out.",
        )
    for component in artifact.components:
        limit = component.max_sizes.get("sequence")
        if options.buckets and limit is not None and options.buckets[-1] > limit:
            raise ConfigError(
                f"The bucket length {options.buckets[-1]} is larger than the {limit} positions of the model.",
                fix=f"use buckets up to {limit}.",
            )


def _check_threads(options: SessionOptions) -> None:
    """Raise for very large numbers of threads, because runtimes start all of them."""
    most = max(_MOST_THREADS, available_processors())
    for name in ("threads", "inter_op_threads"):
        value = getattr(options, name)
        if value is not None and value > most:
            raise ConfigError(
                f"SessionOptions.{name} is {value}, but accel accepts at most {most}. This process may use "
                f"{available_processors()} processors.",
                fix=f"leave {name} out, or pass {available_processors()}: more threads than processors make calls slower.",
            )


def _multiple(options: SessionOptions, spec: BackendSpec, artifact: Artifact) -> int:
    """Return the value of `pad_to_multiple_of` for the sessions: the caller's value, or the value that the backend prefers if
    sequences can be padded, or 1.
    """
    if options.pad_to_multiple_of is not None:
        return options.pad_to_multiple_of
    if options.buckets or why_unpadded(artifact) is not None:
        return 1
    runs = [c for c in spec.capabilities if c.stage == "run" and c.consumes == artifact.format]
    return max((c.preferred_multiple for c in runs), default=1)


def _recorded_options(run: FastestRunSettings, artifact: Artifact) -> SessionOptions:
    """Return the session options in an artifact's `run`, limited to this machine's processors.

    Artifacts are not trusted. Options that write a file, load a library or use all processors are refused.

    Raises:
        ConfigError: The artifact sets such an option.
    """
    recorded = SessionOptions.from_dict(run.session)
    default = SessionOptions()
    for option in fields(SessionOptions):
        value = getattr(recorded, option.name)
        if option.name not in _RECORDED and value != getattr(default, option.name):
            raise _not_from_a_manifest(artifact, f"session.{option.name}", value)
    most = available_processors()
    threads = None if recorded.threads is None else min(recorded.threads, most)
    return replace(recorded, threads=threads, inter_op_threads=min(recorded.inter_op_threads, most))


def _recorded_provider_options(run: FastestRunSettings, spec: BackendSpec, artifact: Artifact) -> Mapping[str, object]:
    for name, value in run.provider_options.items():
        if name not in spec.recorded_options:
            raise _not_from_a_manifest(artifact, f"provider_options.{name}", value)
    return run.provider_options


def _not_from_a_manifest(artifact: Artifact, name: str, value: object) -> ConfigError:
    return ConfigError(
        f"The manifest of {artifact.path} sets run.{name} = {str(value)[:200]!r}. For security, accel does not read this option "
        "from a manifest.",
        fix="pass session_options=SessionOptions() and provider_options={} to ignore the recorded options. If you trust the "
        "artifact, pass the option yourself in session_options or provider_options.",
    )
