"""The backend behind the spec: what is particular to Core ML."""

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
        """Core ML chooses among the units that a device word allows; it does not list them."""
        return tuple(DeviceSpec(kind, name=f"Core ML, {units}") for kind, units in UNITS.items())

    def provider_options(
        self, artifact: Artifact, component: Component, device: DeviceSpec, options: Mapping[str, object]
    ) -> Mapping[str, object]:
        """The units are the device's. An ML Program keeps the graph's types; the older format may compute in half precision."""
        return {**options, "ModelFormat": "MLProgram", "MLComputeUnits": UNITS[device.type]}
