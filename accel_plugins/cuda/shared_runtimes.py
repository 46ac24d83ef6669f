"""Opens ONNX graphs on NVIDIA GPUs: what runs them, and what it computes in."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Mapping

import onnxruntime as ort
import torch

from accel.artifact import Artifact, Component
from accel.capture.graph_forms import FormChecks
from accel.config import SessionOptions
from accel.errors import ConfigError
from accel.interfaces.protocols import OpenRequest, Session
from accel.interfaces.specs import DeviceSpec

from ..ortkit.graph.editing import load_graph
from ..ortkit.optimization.causal_attention import NoCausalFormError
from ..ortkit.optimization.concatenated_cache import growing_form
from ..ortkit.runtime.device_session import DeviceSession
from ..ortkit.runtime.nvidia import CUDA, on_gpu
from ..ortkit.runtime.session import OPTIONS_OBJECT, for_float8, open_runtime
from .decoder_session import CudaDecoderSession
from .options import CudaOptions, read_options
from .runtime import DecoderRuntime, Runtime
from .session import CudaSession

logger = logging.getLogger(__name__)

# Kernels that multiply 8-bit integers. Quantize/Dequantize pairs and packed weights are computed in floating point.
_INTEGER_KERNELS = {
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "QAttention",
    "QGemm",
    "ConvInteger",
}

# ONNX Runtime 1.31 warns at every session that no plugin device is registered for its built-in CUDA provider.
_ERRORS_ONLY = 3


class SharedRuntimes:
    """Opens sessions; those of one graph with the same options share its weights: shape buckets, several loads of a model."""

    def __init__(self) -> None:
        self._runtimes: weakref.WeakValueDictionary[str, Runtime] = weakref.WeakValueDictionary()

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """See `CudaBackend.open`."""
        checked = read_options(request.options, request.device)
        if request.session.compute_dtype not in (None, artifact.dtype):
            raise ConfigError(
                f"The graph computes in {artifact.dtype}, which a CUDA session cannot change to {request.session.compute_dtype}.",
                fix=f"make a {request.session.compute_dtype} artifact: accel optimize --level O4 --backend cuda (float16), or "
                f"accel export --dtype {request.session.compute_dtype}.",
            )
        session = for_float8(request.session, artifact)
        with on_gpu(request.device.index):
            return self._opened(artifact, request, checked, session)

    def _opened(
        self, artifact: Artifact, request: OpenRequest, checked: CudaOptions, session: SessionOptions
    ) -> dict[str, Session]:
        ort.set_default_logger_severity(_ERRORS_ONLY)
        opened: dict[str, Session] = {}
        for component in artifact.components:
            dtype = _compute_dtype(artifact, component, checked)
            checks = FormChecks(
                artifact, component, device=request.device, compute_dtype=dtype,
                versions={"onnxruntime": ort.__version__, "cuda": str(torch.version.cuda)},
            )  # fmt: skip
            try:
                runtime = self._runtime(artifact, component, request.device, checked, session, checks)
            except NoCausalFormError as error:
                opened[component.name] = _plainly(artifact, component, request.device, checked, session, dtype, error)
                continue
            if isinstance(runtime, DecoderRuntime):
                opened[component.name] = CudaDecoderSession(runtime, request.device, dtype)
            else:
                opened[component.name] = CudaSession(runtime, request.device, dtype)
        return opened

    def _runtime(
        self,
        artifact: Artifact,
        component: Component,
        device: DeviceSpec,
        options: CudaOptions,
        session: SessionOptions,
        checks: FormChecks,
    ) -> Runtime:
        path = artifact.path / component.file
        kind = DecoderRuntime if component.stateful else Runtime
        if OPTIONS_OBJECT in session.native:
            return kind(path, component, device, options, session, checks)
        key = json.dumps(
            [str(path), component.files[0].sha256, device.index, options.cuda_graphs, options.padding,
             options.packing, dict(options.provider), session.to_dict()],
            default=str, sort_keys=True,
        )  # fmt: skip
        found = self._runtimes.get(key)
        if found is None:
            found = self._runtimes[key] = kind(path, component, device, options, session, checks)
        return found


def _plainly(
    artifact: Artifact,
    component: Component,
    device: DeviceSpec,
    options: CudaOptions,
    session: SessionOptions,
    compute_dtype: str,
    error: NoCausalFormError,
) -> DeviceSession:
    """A decoder kernel by kernel, its cache a new tensor on the GPU after each step: for attention with biases of its own, for
    masks that are read elsewhere, for float32 and for states of one size.

    Raises:
        SessionError: The graph has attentions that no kernel of the GPU computes.
    """
    path = artifact.path / component.file
    logger.info("%s runs without CUDA graphs, kernel by kernel: %s", path.name, error.message)
    form = growing_form(path, component)
    runtime = open_runtime(
        path,
        form.component,
        provider=CUDA,
        provider_options=options.provider,
        options=session,
        model=form.model,
        disabled_optimizers=DecoderRuntime.disabled_optimizers,
    )
    return DeviceSession(runtime, form.component, device, compute_dtype)


def _compute_dtype(artifact: Artifact, component: Component, options: CudaOptions) -> str:
    """What the kernels compute in: TF32 where it was asked for, int8 only where a kernel multiplies integers."""
    if artifact.manifest.quantization is not None:
        model = load_graph(artifact, component)
        if any(node.op_type in _INTEGER_KERNELS for graph in model.graphs() for node in graph):
            return "int8"
    dtype = artifact.dtype if artifact.dtype != "int8" else "float32"
    return "tf32" if options.tf32 and dtype == "float32" else dtype
