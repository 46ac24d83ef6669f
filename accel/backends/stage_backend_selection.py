"""Plan a stage: choose the backend that exports, optimizes, quantizes or prepares a model, or report why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import OptimizeConfig, QuantizeConfig
from ..errors import BackendUnavailableError, ConfigError, PluginError, did_you_mean
from ..interfaces.specs import WEIGHTS, BackendSpec, Capability, Reason, Stage
from . import registry

_WORKERS = {"export": "exporter", "optimize": "optimizer", "quantize": "quantizer", "prepare": "preparer"}


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The backend for a stage.

    Attributes:
        stage: The stage.
        backend: The backend.
        capability: The backend's declaration of the stage.
    """

    stage: Stage
    backend: BackendSpec
    capability: Capability

    def worker(self) -> Any:
        """Return the exporter, optimizer, quantizer or preparer of the backend. This imports the vendor's library.

        Raises:
            BackendUnavailableError: A package that the backend requires is not installed.
            PluginError: The backend declares the stage but has no object for it.
        """
        name = _WORKERS[self.stage]
        make = getattr(registry.load(self.backend), name, None)
        worker = make() if make is not None else None
        if worker is None:
            raise PluginError(
                f"The backend {self.backend.name!r} declares the stage {self.stage!r}, but its implementation has no {name}."
            )
        return worker


def plan_stage(
    stage: Stage,
    format: str | None,
    backend: str | None = None,
    *,
    scheme: str | None = None,
    domains: Sequence[str] | None = None,
    inventory: registry.Inventory | None = None,
) -> StagePlan:
    """Choose the backend for a stage: the named backend, or the default backend for the format.

    Args:
        stage: The stage.
        format: The format that the stage reads. For `export`, the format that the stage writes; when `None`, ONNX, or the
            named backend's own format if the backend does not write ONNX.
        backend: Name of a backend.
        scheme: The optimization level, quantization scheme or preparation scheme.
        domains: Domains of the graph's operators; `None` if they are unknown.
        inventory: The available backends; the installed backends when `None`.

    Raises:
        ConfigError: The named backend exports models, but not to this format.
        UnknownBackendError: There is no plugin with the name `backend`.
        BackendUnavailableError: No backend supports the stage on this machine, or the backend does not support the operators
            of the graph.
    """
    if inventory is None and backend is None:
        registry.tell_broken()
    inventory = inventory or registry.inventory()
    specs = inventory.specs if backend is None else (inventory.spec(backend),)
    declared = {spec: [offer for offer in spec.capabilities if offer.stage == stage] for spec in specs}
    formats = sorted({_format(offer) for able in declared.values() for offer in able})
    if format is None:
        format = formats[0] if backend is not None and formats and "onnx" not in formats else "onnx"
    if stage == "export" and backend is not None and formats and format not in formats:
        raise ConfigError(
            f"The backend {backend!r} does not export models to the format {format!r}.{did_you_mean(format, formats)}",
            fix=f"use format={' or '.join(map(repr, formats))}, or leave out the format or the backend.",
        )

    def fitting(capabilities: Iterable[Capability]) -> Capability | None:
        reading = (offer for offer in capabilities if offer.stage == stage and _format(offer) == format)
        return next((offer for offer in reading if scheme is None or scheme in offer.schemes), None)

    able = {spec: capability for spec, some in declared.items() if (capability := fitting(some)) is not None}
    ready = [spec for spec in able if inventory.missing(spec) is None]
    if ready:
        # Prefer the backend that exports this format. A backend that only rewrites graphs for its own hardware is used only
        # if the caller names it.
        owner = max(
            ready, key=lambda spec: (bool(spec.capability("export", produces=format)), spec.auto, spec.priority)
        )
        if reason := missing_domains(owner, able[owner], domains, inventory.specs):
            raise BackendUnavailableError(
                f"The backend {owner.name!r} cannot {stage} this graph: {reason.message}.", fix=f"{reason.remedy}."
            )
        return StagePlan(stage, owner, able[owner])
    subject = "No installed backend can" if backend is None else f"The backend {backend!r} cannot"
    problem = f"{subject} {stage} a model in the format {format!r}"
    if stage == "export":
        problem = f"{subject} export a model to the format {format!r}"
    if able:
        reasons = {spec.name: inventory.missing(spec) for spec in able}
        raise BackendUnavailableError(
            f"{problem} on this machine. {'; '.join(f'{name}: {reason}' for name, reason in reasons.items())}.",
            fix=next(reason.remedy for reason in reasons.values() if reason is not None),
        )
    runs = [offer.consumes for spec in specs for offer in spec.capabilities if offer.stage == "run" and offer.consumes]
    if stage == "export" and backend is not None and not formats and runs:
        raise BackendUnavailableError(
            f"The backend {backend!r} exports no models; it runs artifacts of the format {', '.join(dict.fromkeys(runs))}.",
            fix=f"export without backend=... (--backend), then optimize the artifact for {backend!r} or open it with backend={backend!r}.",
        )
    if stage != "export" and formats and format not in formats:
        raise BackendUnavailableError(f"{problem}.", fix=f"pass a model in the format {' or '.join(formats)}.")
    others = [repr(spec.name) for spec in inventory.specs if stage == "prepare" and fitting(spec.capabilities)]
    reading = (offer for some in declared.values() for offer in some if _format(offer) == format)
    offered = sorted({scheme for offer in reading for scheme in offer.schemes})
    if others:
        fix = f"use backend={' or '.join(others)}, or leave backend out."
    else:
        fix = (
            f"use one of {', '.join(offered)}." if offered else "run `accel doctor` to see the stages of each backend."
        )
    with_scheme = f" with the scheme {scheme!r}.{did_you_mean(scheme, offered)}" if scheme else "."
    raise BackendUnavailableError(f"{problem}{with_scheme}", fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemePlan:
    """The backends and settings with which a model is exported, optimized and quantized.

    Attributes:
        exporter: The backend that exports.
        quantizer: The backend that optimizes and quantizes.
        optimize: Settings of the optimization; `None` for no optimization, or if the backend has no optimization levels.
        quantize: Settings of the quantization.
    """

    exporter: StagePlan
    quantizer: StagePlan
    optimize: OptimizeConfig | None
    quantize: QuantizeConfig

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that decide what the artifact contains."""
        optimized = None if self.optimize is None else self.optimize.to_dict()
        return {"backend": self.quantizer.backend.name, "optimize": optimized, "quantize": self.quantize.to_dict()}

    @property
    def is_one_pass(self) -> bool:
        """Whether the backend can do everything in one pass."""
        # Approximations (O3) change the outputs by more than the tolerance for float32.
        exact = self.optimize is None or self.optimize.level in ("O1", "O2")
        same = self.exporter.backend == self.quantizer.backend
        return same and exact and self.quantize.scheme in self.exporter.capability.schemes


def plan_scheme(
    quantization: str | QuantizeConfig, *, exporter: StagePlan, backend: str | None = None, level: str | None = "O2"
) -> SchemePlan:
    """Choose the backend that optimizes and quantizes an export.

    Args:
        quantization: Quantization scheme, or all settings of a quantization.
        exporter: The backend that exports.
        backend: Name of the backend that optimizes and quantizes; the default backend for the format of the export when `None`.
        level: Optimization level, for backends that have it; `None` for no optimization.

    Raises:
        BackendUnavailableError: The backend has no such scheme.
        ConfigError: The backend has optimization levels, and `level` is another one.
    """
    config = QuantizeConfig(scheme=quantization) if isinstance(quantization, str) else quantization
    format = str(exporter.capability.produces)
    quantizer = plan_stage("quantize", format, backend, scheme=config.scheme)
    levels = quantizer.backend.capability("optimize", format)
    if level is not None and levels is not None and level not in levels.schemes:
        raise ConfigError(
            f"The backend {quantizer.backend.name!r} has no optimization level {level!r}.",
            fix=f"use one of {', '.join(levels.schemes)}, or `none`.",
        )
    optimized = OptimizeConfig.merged(None, {"level": level}) if level is not None and levels is not None else None
    return SchemePlan(exporter=exporter, quantizer=quantizer, optimize=optimized, quantize=config)


def _format(capability: Capability) -> str:
    """Return the format that decides which backend runs a stage."""
    if capability.stage == "prepare":
        return WEIGHTS
    return (capability.produces if capability.stage == "export" else capability.consumes) or ""


def missing_domains(
    spec: BackendSpec, capability: Capability, domains: Sequence[str] | None, specs: Iterable[BackendSpec]
) -> Reason | None:
    """Return the reason, with a remedy, why a backend cannot read a graph with operators of these domains; `None` if it
    can.

    Args:
        spec: The backend.
        capability: The capability that reads the graph.
        domains: Domains of the graph's operators; `None` if they are unknown.
        specs: All backends. The remedy names backends that support the operators.
    """
    missing = capability.foreign(domains)
    if not missing:
        return None
    format = capability.consumes
    remedies = []
    if spec.capability("optimize", format, produces=format) is not None:
        remedies.append(
            f"optimize the exported artifact again for this backend: `accel optimize EXPORT OUT --backend {spec.name}`"
        )
    elif spec.capability("export") is not None:
        remedies.append(f"export the model for this backend: `accel export MODEL OUT --backend {spec.name}`")
    else:
        remedies.append("use the exported artifact from before it was optimized or quantized")
    able = [
        other.name
        for other in specs
        if (alternative := other.capability(capability.stage, format)) is not None and not alternative.foreign(domains)
    ]
    if able:
        remedies.append(f"or use the backend {' or '.join(able)}")
    return Reason(
        "operators",
        f"the graph uses operators of {', '.join(missing)}, which this backend does not have",
        ", ".join(remedies),
    )
