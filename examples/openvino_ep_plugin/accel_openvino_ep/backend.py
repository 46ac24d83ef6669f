"""Implementation of the backend for the OpenVINO execution provider of ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from accel.artifact import Artifact, Component
from accel.interfaces.specs import DeviceSpec
from accel_plugins.ortkit.provider import ProviderBackend

from . import SPEC


class OpenVinoEpBackend(ProviderBackend):
    """Backend that runs ONNX graphs with Intel's library of the OpenVINO execution provider."""

    spec = SPEC
    provider = "OpenVINOExecutionProvider"
    install = "pip install onnxruntime onnxruntime-ep-openvino"

    def library(self) -> Path:
        """Return the path of the library in the package `onnxruntime-ep-openvino`."""
        import onnxruntime_ep_openvino

        return Path(onnxruntime_ep_openvino.get_library_path())

    def provider_options(
        self, artifact: Artifact, component: Component, device: DeviceSpec, options: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Return the options with a setting that makes OpenVINO compute in the data type of the graph.

        Without this setting, OpenVINO computes float32 graphs in bfloat16 on processors with AMX.
        """
        exact = {device.type.upper(): {"INFERENCE_PRECISION_HINT": "f16" if artifact.dtype == "float16" else "f32"}}
        return {"load_config": json.dumps(exact), **options}
