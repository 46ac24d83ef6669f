"""Status of the installed backends, with the reasons why some do not work: `accel.list_backends` and `accel doctor`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ..interfaces.specs import BackendSpec, Capability, DeviceSpec, Probe, Reason
from . import registry


@dataclass(frozen=True)
class BackendStatus:
    """The status of a backend on this machine.

    The name and capabilities come from the backend's spec. Reading `available`, `devices`, `reasons` or `versions` for
    the first time imports the vendor's library.

    Attributes:
        name: Name of the backend.
        spec: The spec of the plugin; `None` if the plugin cannot be loaded.
        broken: The reason why the plugin cannot be loaded.
    """

    name: str
    spec: BackendSpec | None = None
    broken: Reason | None = None

    @property
    def summary(self) -> str:
        """Description of the backend in one line."""
        return self.spec.summary if self.spec is not None else "broken plugin"

    @property
    def auto(self) -> bool:
        """Whether the backend may be chosen automatically."""
        return self.spec is not None and self.spec.auto

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        """Declared capabilities of the backend."""
        return self.spec.capabilities if self.spec is not None else ()

    @property
    def prepares(self) -> tuple[str, ...]:
        """Schemes with which the backend prepares PyTorch models."""
        return tuple(scheme for c in self.capabilities if c.stage == "prepare" for scheme in c.schemes)

    @functools.cached_property
    def _probe(self) -> Probe:
        if self.spec is None:
            return Probe(reasons=(self.broken,) if self.broken is not None else ())
        return registry.probe(self.spec)

    @property
    def available(self) -> bool:
        """Whether the backend can use at least one device."""
        return self._probe.available

    @property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """Devices that the backend can use."""
        return self._probe.devices

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Reasons why the backend, or some of its devices, cannot be used."""
        return self._probe.reasons

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the vendor's libraries."""
        return dict(self._probe.versions)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields of the status by name."""
        return {
            "name": self.name,
            "summary": self.summary,
            "available": self.available,
            "auto": self.auto,
            "devices": self.devices,
            "reasons": self.reasons,
            "versions": self.versions,
            "capabilities": self.capabilities,
        }


def list_backends() -> list[BackendStatus]:
    """Return the status of every installed backend, usable or not. Plugins that cannot be loaded have a reason. No
    vendor library is imported.
    """
    specs, broken = registry.describe_all()
    statuses = [BackendStatus(spec.name, spec) for spec in specs]
    statuses += [BackendStatus(name, broken=reason) for name, reason in broken.items()]
    return sorted(statuses, key=lambda status: status.name)
