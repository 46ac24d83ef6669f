"""Core ML backend: the implementation named by the spec."""

from __future__ import annotations

from collections.abc import Mapping

from accel.artifact import Artifact, Component
from accel.interfaces.specs import DeviceSpec
from accel_plugins.ortkit.provider import ProviderBackend

from . import SPEC

UNITS = {"npu": "CPUAndNeuralEngine", "gpu": "CPUAndGPU", "cpu": "CPUOnly"}


class CoreMlBackend(ProviderBackend):
    """Runs ONNX graphs on Apple hardware."""

    spec = SPEC
    provider = "CoreMLExecutionProvider"
    install = "on macOS: pip install onnxruntime"

    def devices(self) -> tuple[DeviceSpec, ...]:
        """Return one device for each set of units that Core ML may use; Core ML does not list its devices."""
        return tuple(DeviceSpec(kind, name=f"Core ML, {units}") for kind, units in UNITS.items())

    def provider_options(
        self, artifact: Artifact, component: Component, device: DeviceSpec, options: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Set the units of the device, and ML Program: it keeps the graph's types; the older format may compute in half precision."""
        return {**options, "ModelFormat": "MLProgram", "MLComputeUnits": UNITS[device.type]}
