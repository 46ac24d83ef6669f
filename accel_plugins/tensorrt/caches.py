"""Where engines and measured kernel times are kept: under `ACCEL_HOME`, by everything that they depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from accel.artifact import Artifact, accel_home, keeping
from accel.errors import TargetMismatchError
from accel.interfaces.shape_profiles import Profile
from accel.interfaces.specs import DeviceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What an engine is built on.

    Attributes:
        gpu: The GPU's name.
        arch: `sm_90`.
        tensorrt: TensorRT's version.
        driver: The driver's.
    """

    gpu: str
    arch: str
    tensorrt: str
    driver: str

    @classmethod
    def of(cls, device: DeviceSpec, versions: Mapping[str, str]) -> Machine:
        """This machine's, from a probe."""
        return cls(
            gpu=device.name,
            arch=device.arch,
            tensorrt=versions.get("tensorrt", "unknown"),
            driver=versions.get("driver", "unknown"),
        )

    def target(self) -> dict[str, str]:
        """What an artifact with a built engine says it needs; a newer driver runs older engines."""
        return {"gpu": self.gpu, "arch": self.arch, "tensorrt": self.tensorrt}


def check_target(artifact: Artifact, machine: Machine) -> None:
    """Refuse an engine that was built elsewhere.

    Raises:
        TargetMismatchError: Another GPU or another TensorRT.
    """
    wanted, have = dict(artifact.manifest.target or {}), machine.target()
    if wanted != have:
        differs = ", ".join(
            f"{key} {wanted.get(key)!r} (here {have[key]!r})" for key in have if wanted.get(key) != have[key]
        )
        raise TargetMismatchError(
            f"{artifact.path} holds an engine that was built for {differs}.",
            fix="build it again here: accel export MODEL OUT --format tensorrt.",
        )


def engine_cache(artifact: Artifact, name: str, machine: Machine, profile: Profile, precision: str) -> Path:
    """The folder for a graph's engines; made, with a file that says what they are for."""
    key = {
        "artifact": artifact.digest,
        "component": name,
        "machine": asdict(machine),
        "profile": {axis: str(sizes) for axis, sizes in sorted(profile.items())},
        "precision": precision,
    }
    text = json.dumps(key, sort_keys=True)
    folder = accel_home() / "tensorrt" / "engines" / hashlib.sha256(text.encode()).hexdigest()[:24]
    with keeping("An engine"):
        folder.mkdir(parents=True, exist_ok=True)
        note = folder / "engine.json"
        if not note.exists():
            note.write_text(json.dumps(key, indent=2) + "\n", encoding="utf-8")
    return folder


def timing_cache(machine: Machine) -> Path:
    """The folder for kernel times, which all graphs share: they depend on the GPU and on TensorRT alone."""
    words = f"{machine.gpu} {machine.arch} {machine.tensorrt} {machine.driver}"
    slug = "".join(c if c.isalnum() or c in "._" else "-" for c in words)
    folder = accel_home() / "tensorrt" / "timing" / slug
    with keeping("Kernel times"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
