"""Implementation of the `tensorrt-rtx` backend: sessions with ONNX Runtime's plugin provider, and engines built on any machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from accel.artifact import Artifact, Component, accel_home, keeping
from accel.capture import usual_sizes_in
from accel.errors import BackendUnavailableError, ConfigError
from accel.interfaces.protocols import Exporter, OpenRequest, Optimizer, Quantizer, Session
from accel.interfaces.shape_profiles import read_profile
from accel.interfaces.specs import DeviceSpec, Probe, Reason

from ..ortkit.engines.artifacts import engine_dtype
from ..ortkit.engines.libraries import TENSORRT_RTX
from ..ortkit.engines.profiles import complete, provider_options
from ..ortkit.engines.session import EngineSession
from ..ortkit.provider import ProviderBackend
from ..ortkit.runtime.nvidia import device_index, survey_gpus, unusable_gpus
from . import FORMAT, SPEC
from .exporter import EngineExporter, check_target, rtx_version

PROVIDER = "NvTensorRTRTXExecutionProvider"
_PROVIDER_PACKAGE = "onnxruntime_ep_nv_tensorrt_rtx"
# The packages `tensorrt-rtx-cu13` are built for CUDA 13.
_CUDA = "13.0"


class TensorrtRtxBackend(ProviderBackend):
    """Backend that builds engines with TensorRT for RTX, and runs ONNX graphs and engines on RTX GPUs."""

    spec = SPEC
    provider = PROVIDER
    install = TENSORRT_RTX.install
    device_types: ClassVar[Mapping[str, str]] = {"gpu": "cuda"}

    def library(self) -> Path:
        """Return the path of the provider's library in the package `onnxruntime-ep-nv-tensorrt-rtx-cu13`."""
        import onnxruntime_ep_nv_tensorrt_rtx as package

        return Path(package.get_library_path())

    def probe(self) -> Probe:
        """Return the GPUs that the library supports, or all reasons why there are none. Creates no CUDA context.

        The provider's library needs the NVIDIA driver to load, so the driver and the GPUs are checked first.
        """
        facts = survey_gpus(PROVIDER, _CUDA)
        supported = [capability for capability, _ in TENSORRT_RTX.builds_for]
        reasons = unusable_gpus(facts, TENSORRT_RTX.title, supported)
        if reasons and importlib.util.find_spec(_PROVIDER_PACKAGE) is None:
            reasons += (Reason("library", "the package of ONNX Runtime's provider is not installed", self.install),)
        verdict = Probe(reasons=reasons) if reasons else super().probe()
        versions = {**verdict.versions, "tensorrt-rtx": rtx_version()}
        if facts.driver is not None:
            versions["driver"] = facts.driver
        return replace(verdict, versions=versions)

    def exporter(self) -> Exporter:
        """Return the exporter of ONNX graphs without operators of ONNX Runtime, which also builds engines from them."""
        return EngineExporter()

    def optimizer(self) -> Optimizer:
        """Return the optimizer that folds constants, simplifies masks and converts to half precision.

        It adds no operators of ONNX Runtime.
        """
        from ..ortkit.optimization.fusions import TENSORRT
        from ..ortkit.optimization.optimizer import OrtOptimizer

        return OrtOptimizer(SPEC.name, TENSORRT)

    def quantizer(self) -> Quantizer:
        """Return the quantizer that writes Q/DQ pairs of INT8 or FP8."""
        from ..ortkit.quantization.gpu_quantizer import GpuQuantizer

        return GpuQuantizer(SPEC.name)

    def provider_options(
        self, artifact: Artifact, component: Component, device: DeviceSpec, options: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Return the options with a shape profile and with the folder in which the provider stores compiled kernels."""
        device_index(options, device)
        usual = usual_sizes_in(artifact.path, component.inputs)
        profile = complete(component, read_profile(str(options.get("profile", ""))), usual)
        cache = accel_home() / "tensorrt_rtx" / artifact.digest.removeprefix("sha256:")[:24] / component.name
        with keeping("Compiled kernels"):
            cache.mkdir(parents=True, exist_ok=True)
        return {
            **{name: _text(value) for name, value in options.items() if name not in ("profile", "device_id")},
            **provider_options(component, profile, "nv"),
            "nv_runtime_cache_path": str(cache),
        }

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Any]:
        """Open a session for every component; see `accel.interfaces.protocols.Backend.open`.

        Raises:
            TargetMismatchError: The engine was built for other compute capabilities, or by another version of the library.
        """
        if artifact.format == FORMAT:
            return self._engines(artifact, request)
        if request.session.compute_dtype not in (None, artifact.dtype):
            raise ConfigError(
                f"The graph computes in {artifact.dtype}, and TensorRT for RTX cannot change the data type to "
                f"{request.session.compute_dtype}.",
                fix=f"create a {request.session.compute_dtype} artifact, for float16 with: accel optimize --backend tensorrt-rtx "
                "--level O4.",
            )
        return super().open(artifact, request)

    def _engines(self, artifact: Artifact, request: OpenRequest) -> dict[str, Session]:
        if request.options:
            raise ConfigError(
                f"A prebuilt engine has no options, but the options {sorted(request.options)} were passed.",
                fix="leave the options out.",
            )
        if not torch.cuda.is_available():
            raise BackendUnavailableError(
                "An engine reads and writes GPU memory through PyTorch, and this build of PyTorch has no CUDA support.",
                fix="pip install torch --index-url https://download.pytorch.org/whl/cu130",
            )
        check_target(artifact, request.device)
        return {
            component.name: EngineSession(
                (artifact.path / component.file).read_bytes(),
                request.device,
                library=TENSORRT_RTX,
                compute_dtype=engine_dtype(artifact),
                inputs=component.inputs,
                outputs=component.outputs,
                limits=component.max_sizes,
            )
            for component in artifact.components
        }


def _text(value: object) -> str:
    return {"True": "1", "False": "0"}.get(str(value), str(value))
