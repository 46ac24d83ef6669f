"""Cache folders for TensorRT engines and for measured kernel times, in the folder `ACCEL_HOME`.

The name of a cache folder depends on everything that its content depends on.
"""

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
class EngineMachine:
    """The machine that an engine is built on.

    Attributes:
        gpu: The name of the GPU.
        arch: The architecture of the GPU, for example `sm_90`.
        tensorrt: The version of TensorRT.
        driver: The version of the driver.
    """

    gpu: str
    arch: str
    tensorrt: str
    driver: str

    @classmethod
    def of(cls, device: DeviceSpec, versions: Mapping[str, str]) -> EngineMachine:
        """Return the description of this machine, from the device and versions of a probe."""
        return cls(
            gpu=device.name,
            arch=device.arch,
            tensorrt=versions.get("tensorrt", "unknown"),
            driver=versions.get("driver", "unknown"),
        )

    def target(self) -> dict[str, str]:
        """Return the target that a built engine requires.

        The driver is not included, because newer drivers run older engines.
        """
        return {"gpu": self.gpu, "arch": self.arch, "tensorrt": self.tensorrt}


def check_target(artifact: Artifact, machine: EngineMachine) -> None:
    """Check that an engine was built for this GPU and TensorRT version.

    Raises:
        TargetMismatchError: The engine was built for another GPU or another TensorRT version.
    """
    target, current = dict(artifact.manifest.target or {}), machine.target()
    if target != current:
        differs = ", ".join(
            f"{key} {target.get(key)!r} (this machine has {current[key]!r})"
            for key in current
            if target.get(key) != current[key]
        )
        raise TargetMismatchError(
            f"The engine in {artifact.path} was built for {differs}.",
            fix="build the engine again on this machine: accel export MODEL OUT --format tensorrt.",
        )


def engine_cache(artifact: Artifact, name: str, machine: EngineMachine, profile: Profile, precision: str) -> Path:
    """Create and return the cache folder for a graph's engines, with a file that describes the engines."""
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


def timing_cache(machine: EngineMachine) -> Path:
    """Create and return the cache folder for measured kernel times.

    All graphs share the folder, because kernel times depend only on the GPU, TensorRT and the driver.
    """
    words = f"{machine.gpu} {machine.arch} {machine.tensorrt} {machine.driver}"
    slug = "".join(c if c.isalnum() or c in "._" else "-" for c in words)
    folder = accel_home() / "tensorrt" / "timing" / slug
    with keeping("Kernel times"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
