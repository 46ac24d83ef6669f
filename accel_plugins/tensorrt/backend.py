"""Implementation of the `tensorrt` backend: sessions with ONNX Runtime's TensorRT provider, and prebuilt engines."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata

from accel.artifact import Artifact, Component
from accel.capture import usual_sizes_in
from accel.errors import ConfigError, SessionError
from accel.interfaces.protocols import Exporter, OpenRequest, Optimizer, Quantizer, Session
from accel.interfaces.specs import DeviceSpec, Probe, Reason

from ..ortkit.engines.artifacts import engine_dtype
from ..ortkit.engines.libraries import TENSORRT as LIBRARY
from ..ortkit.engines.profiles import complete, provider_options
from ..ortkit.engines.session import EngineSession
from ..ortkit.graph.editing import load_graph
from ..ortkit.runtime.device_session import DeviceSession
from ..ortkit.runtime.nvidia import CUDA, TENSORRT, judge, on_gpu, survey
from ..ortkit.runtime.session import for_float8, open_runtime
from . import FORMAT
from .building import EngineExporter
from .caches import EngineMachine, check_target, engine_cache, timing_cache
from .options import TensorrtOptions, precision_flags, precisions, read_options


class TensorrtBackend:
    """Backend that builds and runs TensorRT engines."""

    def probe(self) -> Probe:
        """Return the GPUs, or all reasons why TensorRT cannot use them. Creates no CUDA context."""
        try:
            if importlib.util.find_spec("tensorrt") is not None:
                # The import loads TensorRT's libraries, so that ONNX Runtime's provider finds them.
                importlib.import_module("tensorrt")
            verdict = judge(survey(TENSORRT))
        # Third-party libraries may raise anything: report every exception as a reason instead of crashing.
        except Exception as error:  # noqa: BLE001
            reason = Reason(
                "probe-failed", f"the check for TensorRT failed: {type(error).__name__}: {error}", LIBRARY.install
            )
            return Probe(reasons=(reason,))
        version = tensorrt_version()
        if version is None:
            reason = Reason("no-tensorrt", "the package tensorrt is not installed", LIBRARY.install)
            return replace(verdict, devices=(), reasons=(*verdict.reasons, reason))
        return replace(verdict, versions={**verdict.versions, "tensorrt": version})

    def exporter(self) -> Exporter:
        """Return the exporter that builds engines ahead of time."""
        return EngineExporter(self.probe)

    def optimizer(self) -> Optimizer:
        """Return the optimizer that folds constants, simplifies masks and converts to half precision.

        It adds no operators of ONNX Runtime.
        """
        from ..ortkit.optimization.fusions import TENSORRT
        from ..ortkit.optimization.optimizer import OrtOptimizer

        return OrtOptimizer("tensorrt", TENSORRT)

    def quantizer(self) -> Quantizer:
        """Return the quantizer that writes Q/DQ pairs of INT8 or FP8."""
        from ..ortkit.quantization.gpu_quantizer import GpuQuantizer

        return GpuQuantizer("tensorrt")

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Open a session for every component; see `accel.interfaces.protocols.Backend.open`.

        When an ONNX graph is opened for the first time, its engine is built, which takes minutes. Later, the engine is
        loaded from the cache.

        Raises:
            TargetMismatchError: The engine was built for another GPU or by another version of TensorRT.
        """
        if request.session.compute_dtype not in (None, artifact.dtype):
            raise ConfigError(
                f"The graph computes in {artifact.dtype}, and TensorRT cannot change the data type to "
                f"{request.session.compute_dtype}.",
                fix=f"create a {request.session.compute_dtype} artifact, for float16 with: accel optimize --backend tensorrt --level O4.",
            )
        if any(component.stateful for component in artifact.components):
            raise SessionError(
                f"The model in {artifact.path} is a decoder with a KV cache, which the backend 'tensorrt' cannot run.",
                fix="run the model with backend='cpu', or export it with accel in float16 and run it with backend='cuda'.",
            )
        machine = EngineMachine.of(request.device, self.probe().versions)
        if artifact.format == FORMAT:
            if request.options:
                raise ConfigError(
                    f"A prebuilt engine has no options, but the options {sorted(request.options)} were passed.",
                    fix="leave the options out.",
                )
            check_target(artifact, machine)
            return {c.name: self._engine(artifact, c, request.device) for c in artifact.components}
        options = read_options(request.options, request.device)
        return {c.name: self._session(artifact, c, request, options, machine) for c in artifact.components}

    @staticmethod
    def _engine(artifact: Artifact, component: Component, device: DeviceSpec) -> EngineSession:
        return EngineSession(
            (artifact.path / component.file).read_bytes(),
            device,
            compute_dtype=engine_dtype(artifact),
            inputs=component.inputs,
            outputs=component.outputs,
            limits=component.max_sizes,
        )

    @staticmethod
    def _session(
        artifact: Artifact, component: Component, request: OpenRequest, options: TensorrtOptions, machine: EngineMachine
    ) -> DeviceSession:
        """Open ONNX Runtime's session; nodes that TensorRT has no kernels for run on the CUDA provider."""
        usual = {**usual_sizes_in(artifact.path, component.inputs), **(request.shapes or {})}
        profile = complete(component, options.profile, usual)
        low = precisions(load_graph(artifact, component))
        cache = engine_cache(artifact, component.name, machine, profile, "+".join(low) or "float32")
        with on_gpu(request.device.index):
            runtime = open_runtime(
                artifact.path / component.file,
                component,
                provider=TENSORRT,
                provider_options={
                    **options.provider,
                    **provider_options(component, profile, "trt"),
                    **precision_flags(low),
                    "trt_engine_cache_enable": "1",
                    "trt_engine_cache_path": str(cache),
                    "trt_timing_cache_enable": "1",
                    "trt_timing_cache_path": str(timing_cache(machine)),
                },
                options=for_float8(request.session, artifact),
                others=((CUDA, {"device_id": str(request.device.index)}),),
            )
        eight_bits = [word for word in low if word in ("int8", "float8_e4m3fn")]
        return DeviceSession(runtime, component, request.device, (*eight_bits, artifact.dtype)[0])


def tensorrt_version() -> str | None:
    """Return TensorRT's version from the metadata of the installed distribution; `None` if it is not installed."""
    for name in ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
