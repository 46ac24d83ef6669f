"""Opening of ONNX graphs on NVIDIA GPUs: the runtimes that sessions share, and the data type of the computation."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Mapping

import onnxruntime as ort
import torch

from accel.artifact import Artifact, Component
from accel.capture.fast_path_verification import FastPathVerifier
from accel.config import SessionOptions
from accel.errors import ConfigError
from accel.interfaces.protocols import OpenRequest, Session
from accel.interfaces.specs import DeviceSpec

from ..ortkit.graph.editing import load_graph
from ..ortkit.optimization.concatenated_cache import growing_form
from ..ortkit.optimization.maskless_decoder import MaskRemovalError
from ..ortkit.runtime.device_session import DeviceSession
from ..ortkit.runtime.nvidia import CUDA, on_gpu
from ..ortkit.runtime.session import OPTIONS_OBJECT, for_float8, open_runtime
from .decoder_session import CudaDecoderSession
from .options import CudaOptions, read_options
from .runtime import DecoderRuntime, GraphOpenRequest, Runtime
from .session import CudaSession

logger = logging.getLogger(__name__)

# Operators with kernels for 8-bit integer products. Q/DQ pairs and packed weights are computed in floating point.
_INTEGER_KERNELS = {
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "QAttention",
    "QGemm",
    "ConvInteger",
}

# Log only errors: ONNX Runtime 1.31 logs a harmless warning for every session, because no plugin device is registered
# for its built-in CUDA provider.
_ERRORS_ONLY = 3


class SharedRuntimes:
    """Opens sessions that share weights if they have the same graph and options.

    Examples are the sessions of different shape buckets, and several loads of one model.
    """

    def __init__(self) -> None:
        self._runtimes: weakref.WeakValueDictionary[str, Runtime] = weakref.WeakValueDictionary()

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Open a session for every component; see `CudaBackend.open`."""
        checked = read_options(request.options, request.device)
        if request.session.compute_dtype not in (None, artifact.dtype):
            raise ConfigError(
                f"The graph computes in {artifact.dtype}, and a CUDA session cannot change the data type to "
                f"{request.session.compute_dtype}.",
                fix=f"create a {request.session.compute_dtype} artifact: accel optimize --level O4 --backend cuda (float16), or "
                f"accel export --dtype {request.session.compute_dtype}.",
            )
        session = for_float8(request.session, artifact)
        ort.set_default_logger_severity(_ERRORS_ONLY)
        with on_gpu(request.device.index):
            return {
                component.name: self._session(artifact, component, request.device, checked, session)
                for component in artifact.components
            }

    def _session(
        self,
        artifact: Artifact,
        component: Component,
        device: DeviceSpec,
        options: CudaOptions,
        session: SessionOptions,
    ) -> Session:
        dtype = _compute_dtype(artifact, component, options)
        checks = FastPathVerifier(
            artifact, component, device=device, compute_dtype=dtype,
            versions={"onnxruntime": ort.__version__, "cuda": str(torch.version.cuda)},
        )  # fmt: skip
        request = GraphOpenRequest(artifact.path / component.file, component, device, options, session, checks)
        try:
            runtime = self._runtime(request)
        except MaskRemovalError as error:
            logger.info(
                "%s runs without CUDA graphs, so each kernel is launched separately: %s",
                request.path.name,
                error.message,
            )
            return _growing_session(request, dtype)
        if isinstance(runtime, DecoderRuntime):
            return CudaDecoderSession(runtime, device, dtype)
        return CudaSession(runtime, device, dtype)

    def _runtime(self, request: GraphOpenRequest) -> Runtime:
        component, options, session = request.component, request.options, request.session
        kind = DecoderRuntime if component.stateful else Runtime
        if OPTIONS_OBJECT in session.native:
            return kind(request)
        key = json.dumps(
            [str(request.path), component.files[0].sha256, request.device.index, options.cuda_graphs, options.padding,
             options.packing, dict(options.provider), session.to_dict()],
            default=str, sort_keys=True,
        )  # fmt: skip
        runtime = self._runtimes.get(key)
        if runtime is None:
            runtime = self._runtimes[key] = kind(request)
        return runtime


def _growing_session(request: GraphOpenRequest, compute_dtype: str) -> DeviceSession:
    """Open a decoder session without CUDA graphs. Its KV cache is a new tensor on the GPU after each step.

    The session is used for decoders that CUDA graphs do not support: attention with biases, masks that are read outside
    of attention, float32, and recurrent states of fixed size.

    Raises:
        SessionError: The graph has an attention that cannot be computed on the GPU.
    """
    form = growing_form(request.path, request.component)
    runtime = open_runtime(
        request.path,
        form.component,
        provider=CUDA,
        provider_options=request.options.provider,
        options=request.session,
        model=form.model,
        disabled_optimizers=DecoderRuntime.disabled_optimizers,
    )
    return DeviceSession(runtime, form.component, request.device, compute_dtype)


def _compute_dtype(artifact: Artifact, component: Component, options: CudaOptions) -> str:
    """Return the data type of the computation: TF32 if requested, int8 only if a kernel multiplies integers."""
    if artifact.manifest.quantization is not None:
        model = load_graph(artifact, component)
        if any(node.op_type in _INTEGER_KERNELS for graph in model.graphs() for node in graph):
            return "int8"
    dtype = artifact.dtype if artifact.dtype != "int8" else "float32"
    return "tf32" if options.tf32 and dtype == "float32" else dtype
