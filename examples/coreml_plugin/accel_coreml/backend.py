"""Implementation of the Core ML backend. The field `impl` of the spec names its class."""

from __future__ import annotations

from collections.abc import Mapping

from accel.artifact import Artifact, Component
from accel.interfaces.specs import DeviceSpec
from accel_plugins.ortkit.provider import ProviderBackend

from . import SPEC

UNITS = {"npu": "CPUAndNeuralEngine", "gpu": "CPUAndGPU", "cpu": "CPUOnly"}


class CoreMlBackend(ProviderBackend):
    """Backend that runs ONNX graphs on Apple hardware."""

    spec = SPEC
    provider = "CoreMLExecutionProvider"
    install = "on macOS: pip install onnxruntime"

    def devices(self) -> tuple[DeviceSpec, ...]:
        """Return one device for each value of `MLComputeUnits`, because Core ML cannot list the devices of the machine."""
        return tuple(DeviceSpec(kind, name=f"Core ML, {units}") for kind, units in UNITS.items())

    def provider_options(
        self, artifact: Artifact, component: Component, device: DeviceSpec, options: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Return the options with the compute units of the device and the model format `MLProgram`.

        `MLProgram` computes in the types of the graph. Core ML's older format may compute in half precision.
        """
        return {**options, "ModelFormat": "MLProgram", "MLComputeUnits": UNITS[device.type]}
