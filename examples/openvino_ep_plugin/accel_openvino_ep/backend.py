"""OpenVINO plugin backend: the path of Intel's library, and an option to compute in the graph's data type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from accel.artifact import Artifact, Component
from accel.interfaces.specs import DeviceSpec
from accel_plugins.ortkit.provider import ProviderBackend

from . import SPEC


class OpenVinoEpBackend(ProviderBackend):
    """Runs ONNX graphs with Intel's execution provider library."""

    spec = SPEC
    provider = "OpenVINOExecutionProvider"
    install = "pip install onnxruntime onnxruntime-ep-openvino"

    def library(self) -> Path:
        """Return the path of the library in Intel's package."""
        import onnxruntime_ep_openvino

        return Path(onnxruntime_ep_openvino.get_library_path())

    def provider_options(
        self, artifact: Artifact, component: Component, device: DeviceSpec, options: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Compute in the graph's data type: by default, OpenVINO computes float32 graphs in bfloat16 on processors with AMX."""
        exact = {device.type.upper(): {"INFERENCE_PRECISION_HINT": "f16" if artifact.dtype == "float16" else "f32"}}
        return {"load_config": json.dumps(exact), **options}
