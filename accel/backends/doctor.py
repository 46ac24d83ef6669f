"""What is installed, what works here and why the rest does not: `accel.list_backends` and `accel doctor`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ..interfaces.specs import BackendSpec, Capability, DeviceSpec, Probe, Reason
from . import registry


@dataclass(frozen=True)
class BackendStatus:
    """One backend as found on this machine.

    Its name and what it can do are known at once; the vendor's library is imported when `available`, `devices`, `reasons` or
    `versions` is read for the first time.

    Attributes:
        name: The word for it.
        spec: What the plugin says about itself; `None` for one that cannot be loaded.
        broken: Why it cannot be loaded.
    """

    name: str
    spec: BackendSpec | None = None
    broken: Reason | None = None

    @property
    def summary(self) -> str:
        """One line."""
        return self.spec.summary if self.spec is not None else "broken plugin"

    @property
    def auto(self) -> bool:
        """Whether it may be chosen automatically."""
        return self.spec is not None and self.spec.auto

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        """What it says it can do."""
        return self.spec.capabilities if self.spec is not None else ()

    @property
    def prepares(self) -> tuple[str, ...]:
        """The ways in which it prepares PyTorch models."""
        return tuple(scheme for c in self.capabilities if c.stage == "prepare" for scheme in c.schemes)

    @functools.cached_property
    def _probe(self) -> Probe:
        if self.spec is None:
            return Probe(reasons=(self.broken,) if self.broken is not None else ())
        return registry.probe(self.spec)

    @property
    def available(self) -> bool:
        """Whether at least one device can be used."""
        return self._probe.available

    @property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """Devices that can be used."""
        return self._probe.devices

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why it, or some of its devices, cannot be used."""
        return self._probe.reasons

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the vendor's libraries."""
        return dict(self._probe.versions)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as found here."""
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
    """Every installed plugin, usable or not; a broken one is listed with its reason. Imports no vendor library."""
    specs, broken = registry.describe_all()
    found = [BackendStatus(spec.name, spec) for spec in specs]
    found += [BackendStatus(name, broken=reason) for name, reason in broken.items()]
    return sorted(found, key=lambda status: status.name)
