"""What is installed, what works here and why the rest does not: `accel doctor` and `list_backends`."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from . import __version__, registry
from .artifact import accel_home
from .config import available_processors
from .specs import Capability, DeviceSpec, Reason

_LIBRARIES = (
    "torch",
    "transformers",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "nncf",
    "datasets",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    """One backend as found on this machine."""

    name: str
    summary: str
    available: bool
    auto: bool
    devices: tuple[DeviceSpec, ...] = ()
    reasons: tuple[Reason, ...] = ()
    versions: dict[str, str]
    capabilities: tuple[Capability, ...] = ()


def list_backends() -> list[BackendStatus]:
    """Every installed plugin, usable or not; a broken one is listed with its reason. Imports vendor libraries."""
    specs, broken = registry.describe_all()
    found = []
    for spec in specs:
        probe = registry.probe(spec)
        found.append(
            BackendStatus(
                name=spec.name,
                summary=spec.summary,
                available=probe.available,
                auto=spec.auto,
                devices=probe.devices,
                reasons=probe.reasons,
                versions=dict(probe.versions),
                capabilities=spec.capabilities,
            )
        )
    found += [
        BackendStatus(name=name, summary="broken plugin", available=False, auto=False, reasons=(reason,), versions={})
        for name, reason in broken.items()
    ]
    return sorted(found, key=lambda status: status.name)


def machine() -> dict[str, Any]:
    """Facts that measurements depend on."""
    return {
        "accel": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": available_processors(),
        "processors_of_machine": os.cpu_count(),
        "libraries": {name: version for name in _LIBRARIES if (version := _version(name)) is not None},
        "home": str(accel_home()),
        "executable": sys.executable,
    }


def conflicts() -> list[Reason]:
    """Installations that cannot work together."""
    found = []
    if _version("onnxruntime") and _version("onnxruntime-gpu"):
        found.append(
            Reason(
                "two-onnxruntimes",
                "onnxruntime and onnxruntime-gpu are both installed; they own the same import name and overwrite each other",
                "pip uninstall -y onnxruntime onnxruntime-gpu, then install the one you want",
            )
        )
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
