"""The backend behind the spec: where the library is, and that it computes in the graph's type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from accel.artifact import Artifact, Component
from accel.interfaces.specs import DeviceSpec
from accel_plugins.ortkit.provider import ProviderBackend

from . import SPEC


class OpenVinoEpBackend(ProviderBackend):
    """Runs ONNX graphs with Intel's library."""

    spec = SPEC
    provider = "OpenVINOExecutionProvider"
    install = "pip install onnxruntime onnxruntime-ep-openvino"

    def library(self) -> Path:
        """Intel's package says where its library is."""
        import onnxruntime_ep_openvino

        return Path(onnxruntime_ep_openvino.get_library_path())

    def provider_options(
        self, artifact: Artifact, component: Component, device: DeviceSpec, options: Mapping[str, object]
    ) -> Mapping[str, object]:
        """OpenVINO computes float32 in bfloat16 on processors with AMX unless it is told the type."""
        exact = {device.type.upper(): {"INFERENCE_PRECISION_HINT": "f16" if artifact.dtype == "float16" else "f32"}}
        return {"load_config": json.dumps(exact), **options}
