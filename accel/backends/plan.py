"""Chooses the backend that runs an artifact: a pure function, with the table of everything that it considered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..interfaces.specs import BackendSpec, Capability, DeviceSpec, Probe, Reason


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the selection table.

    Attributes:
        backend: Its name.
        verdict: `chosen`, `possible` (it would work when named) or `rejected`.
        device: The device it would use.
        reasons: Why it was not chosen.
    """

    backend: str
    verdict: Literal["chosen", "possible", "rejected"]
    device: DeviceSpec | None
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend and device chosen (`None` when nothing fits) and the table of everything considered."""

    backend: str | None
    device: DeviceSpec | None
    table: tuple[Row, ...]

    def __str__(self) -> str:
        width = max((len(row.backend) for row in self.table), default=0)
        lines = []
        for row in self.table:
            why = "; ".join(str(reason) for reason in row.reasons)
            where = f" on {row.device}" if row.device is not None else ""
            lines.append(f"  {row.backend:<{width}}  {row.verdict}{where}{': ' + why if why else ''}")
        return "\n".join(lines) or "  (no backend is installed)"


def select(
    *,
    format: str,
    task: str,
    dtype: str,
    device: DeviceSpec | None,
    specs: Iterable[BackendSpec],
    probes: Mapping[str, Probe],
    backend: str | None = None,
    domains: Sequence[str] | None = None,
) -> Selection:
    """Choose the backend that runs an artifact. A function of its arguments alone.

    A backend that is named is the only candidate. Otherwise the one with the highest priority wins among those whose
    spec allows automatic choice, which are the ones that do not change numerics. One whose runtime lacks a domain of the
    graph's operators (`domains`; `None` where they are unknown) is rejected.
    """
    specs = tuple(specs)
    rows: list[tuple[BackendSpec, DeviceSpec | None, list[Reason]]] = []
    for spec in specs:
        reasons, found = _obstacles(spec, probes[spec.name], format=format, task=task, dtype=dtype, device=device)
        capability = spec.capability("run", format, task=task)
        if capability is not None and (missing := missing_domains(spec, capability, domains, specs)) is not None:
            reasons.insert(0, missing)
        rows.append((spec, found, reasons))
    fitting = [
        (spec, found)
        for spec, found, reasons in rows
        if not reasons and (spec.name == backend if backend is not None else spec.auto)
    ]
    chosen = max(fitting, key=lambda item: item[0].priority, default=None)
    table = []
    for spec, found, reasons in rows:
        if chosen is not None and spec is chosen[0]:
            table.append(Row(spec.name, "chosen", found, ()))
        elif reasons:
            table.append(Row(spec.name, "rejected", None, tuple(reasons)))
        else:
            named = backend is not None and spec.name != backend
            why = (
                Reason("not-named", f"{backend!r} was asked for")
                if named
                else Reason("lower-priority", "another one has priority")
                if spec.auto
                else Reason("by-name-only", "only used when named", f"backend={spec.name!r}")
            )
            table.append(Row(spec.name, "possible", found, (why,)))
    return Selection(chosen[0].name if chosen else None, chosen[1] if chosen else None, tuple(table))


def missing_domains(
    spec: BackendSpec, capability: Capability, domains: Sequence[str] | None, specs: Iterable[BackendSpec]
) -> Reason | None:
    """Why a backend cannot read a graph with operators of these domains, and what to do instead; `None` when it can.

    Args:
        spec: The backend.
        capability: What it is to do.
        domains: Domains of the graph's operators; `None` where they are unknown.
        specs: All backends, of which the remedy names those that have the operators.
    """
    missing = capability.foreign(domains)
    if not missing:
        return None
    format = capability.consumes
    remedies = []
    if spec.capability("optimize", format, produces=format) is not None:
        remedies.append(
            f"make the graph without them: `accel optimize EXPORT OUT --backend {spec.name}`, from the artifact as it was "
            "exported"
        )
    elif spec.capability("export") is not None:
        remedies.append(f"export the model for it: `accel export MODEL OUT --backend {spec.name}`")
    else:
        remedies.append("take the artifact as it was exported, before it was optimized or quantized")
    able = [
        one.name
        for one in specs
        if (found := one.capability(capability.stage, format)) is not None and not found.foreign(domains)
    ]
    if able:
        remedies.append(f"or use the backend {' or '.join(able)}")
    return Reason(
        "operators", f"it has no operators of {', '.join(missing)}, which this graph uses", ", ".join(remedies)
    )


def _other_format(spec: BackendSpec, format: str, task: str) -> Reason | None:
    """That a backend runs this task in other formats than this one, and the remedy; `None` when it runs it in none."""
    others = sorted(
        {one.consumes for one in spec.capabilities if one.stage == "run" and one.consumes and one.does(task)}
    )
    if not others:
        return None
    able = any(one.stage == "export" and one.does(task) for one in spec.capabilities)
    remedy = f"export the model for it: `accel export MODEL OUT --backend {spec.name}`" if able else ""
    return Reason("task", f"it runs {task} from {', '.join(others)}, not from {format}", remedy)


def _obstacles(
    spec: BackendSpec, probe: Probe, *, format: str, task: str, dtype: str, device: DeviceSpec | None
) -> tuple[list[Reason], DeviceSpec | None]:
    """Everything that keeps a backend from running this, and the device it would use."""
    reasons: list[Reason] = []
    capability = spec.capability("run", format, task=task)
    if capability is None:
        formats = sorted({c.consumes for c in spec.capabilities if c.stage == "run" and c.consumes})
        reasons.append(Reason("format", f"it runs {', '.join(formats) or 'nothing'}, not {format}"))
    else:
        if dtype not in capability.dtypes:
            what = f"it does not run {dtype} graphs{'' if '*' in capability.tasks else f' for {task}'}"
            reasons.append(Reason("dtype", f"{what}, only {', '.join(capability.dtypes)}"))
        if not capability.does(task):
            reasons.append(_other_format(spec, format, task) or Reason("task", f"it does not run {task}"))
    found = None
    if not probe.available:
        reasons.extend(probe.reasons or (Reason("no-device", "it found no device"),))
    elif device is None:
        found = probe.devices[0]
    else:
        found = next((d for d in probe.devices if (d.type, d.index) == (device.type, device.index)), None)
        if found is None:
            have = ", ".join(str(d) for d in probe.devices)
            reasons.append(Reason("device", f"it has no device {device}, only {have}"))
    return reasons, found
