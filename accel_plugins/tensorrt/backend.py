"""TensorRT: ONNX graphs through ONNX Runtime's provider, and engines built ahead of time."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata

from accel.artifact import Artifact, Component
from accel.capture import usual_sizes_in
from accel.config import SessionOptions
from accel.errors import ConfigError, SessionError
from accel.interfaces.protocols import Exporter, OpenRequest, Optimizer, Quantizer, Session, Shapes
from accel.interfaces.specs import DeviceSpec, Probe, Reason

from ..ortkit.graph.editing import load_graph
from ..ortkit.runtime.device_session import DeviceSession
from ..ortkit.runtime.nvidia import CUDA, TENSORRT, judge, on_gpu, survey
from ..ortkit.runtime.session import for_float8, open_runtime
from . import FORMAT
from .building import EngineExporter
from .caches import Machine, check_target, engine_cache, timing_cache
from .engines import INSTALL, EngineSession
from .options import TensorrtOptions, precision_flags, precisions, read_options
from .profiles import complete, provider_options


class TensorrtBackend:
    """Builds and runs TensorRT engines."""

    def probe(self) -> Probe:
        """The GPUs, or every reason why TensorRT cannot use them. Makes no CUDA context."""
        try:
            if importlib.util.find_spec("tensorrt") is not None:
                # Loads TensorRT's libraries, which ONNX Runtime's provider then finds.
                importlib.import_module("tensorrt")
            found = judge(survey(TENSORRT))
        # Foreign libraries in unknown states: whatever they raise is a reason, not a crash.
        except Exception as error:  # noqa: BLE001
            reason = Reason("probe-failed", f"looking for TensorRT failed: {type(error).__name__}: {error}", INSTALL)
            return Probe(reasons=(reason,))
        version = tensorrt_version()
        if version is None:
            reason = Reason("no-tensorrt", "the package tensorrt is not installed", INSTALL)
            return replace(found, devices=(), reasons=(*found.reasons, reason))
        return replace(found, versions={**found.versions, "tensorrt": version})

    def exporter(self) -> Exporter:
        """Builds engines ahead of time."""
        return EngineExporter(self.probe)

    def optimizer(self) -> Optimizer:
        """Constants, masks and float16, without operators of ONNX Runtime's own."""
        from ..ortkit.optimization.fusions import TENSORRT
        from ..ortkit.optimization.optimizer import OrtOptimizer

        return OrtOptimizer("tensorrt", TENSORRT)

    def quantizer(self) -> Quantizer:
        """Q/DQ pairs of INT8 or FP8."""
        from ..ortkit.quantization.gpu_quantizer import GpuQuantizer

        return GpuQuantizer("tensorrt")

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Open every component; see `accel.interfaces.protocols.Backend.open`.

        The first opening of an ONNX graph builds its engine, which takes minutes; later ones load it from the cache.

        Raises:
            TargetMismatchError: An engine that was built for another GPU or by another TensorRT.
        """
        if request.session.compute_dtype not in (None, artifact.dtype):
            raise ConfigError(
                f"The graph computes in {artifact.dtype}, which TensorRT cannot change to {request.session.compute_dtype}.",
                fix="make such an artifact: accel optimize --backend tensorrt --level O4 (float16).",
            )
        if any(component.stateful for component in artifact.components):
            raise SessionError(
                f"{artifact.path} is a decoder with a cache, which TensorRT does not run here.",
                fix="run it with backend='cpu'; in float16 with our own export, with backend='cuda'.",
            )
        machine = Machine.of(request.device, self.probe().versions)
        if artifact.format == FORMAT:
            if request.options:
                raise ConfigError(f"An engine has no options, not {sorted(request.options)}.", fix="leave them out.")
            check_target(artifact, machine)
            return {c.name: self._engine(artifact, c, request.device) for c in artifact.components}
        checked = read_options(request.options, request.device)
        return {
            c.name: self._session(artifact, c, request.device, checked, request.session, request.shapes, machine)
            for c in artifact.components
        }

    @staticmethod
    def _engine(artifact: Artifact, component: Component, device: DeviceSpec) -> EngineSession:
        plan = (artifact.path / component.file).read_bytes()
        quantized = artifact.manifest.quantization is not None
        return EngineSession(
            plan,
            device,
            compute_dtype="int8" if quantized else artifact.dtype,
            inputs=component.inputs,
            outputs=component.outputs,
            limits=component.max_sizes,
        )

    @staticmethod
    def _session(
        artifact: Artifact,
        component: Component,
        device: DeviceSpec,
        options: TensorrtOptions,
        session: SessionOptions,
        shapes: Shapes | None,
        machine: Machine,
    ) -> DeviceSession:
        """ONNX Runtime's session; what TensorRT has no kernels for is left to CUDA."""
        profile = complete(
            component, options.profile, {**usual_sizes_in(artifact.path, component.inputs), **(shapes or {})}
        )
        found = precisions(load_graph(artifact, component))
        precision = "+".join(found) or "float32"
        cache = engine_cache(artifact, component.name, machine, profile, precision)
        with on_gpu(device.index):
            runtime = open_runtime(
                artifact.path / component.file,
                component,
                provider=TENSORRT,
                provider_options={
                    **options.provider,
                    **provider_options(component, profile),
                    **precision_flags(found),
                    "trt_engine_cache_enable": "1",
                    "trt_engine_cache_path": str(cache),
                    "trt_timing_cache_enable": "1",
                    "trt_timing_cache_path": str(timing_cache(machine)),
                },
                options=for_float8(session, artifact),
                others=((CUDA, {"device_id": str(device.index)}),),
            )
        low = [word for word in found if word in ("int8", "float8_e4m3fn")]
        return DeviceSession(runtime, component, device, low[0] if low else artifact.dtype)


def tensorrt_version() -> str | None:
    """TensorRT's version, from the metadata of the distribution that brought it."""
    for name in ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
