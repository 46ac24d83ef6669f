"""The backend `openvino`: devices and compilation of graphs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openvino as ov

from accel.artifact import Artifact, Component
from accel.config import SessionOptions
from accel.errors import ConfigError, SessionError
from accel.interfaces.cpu_features import adds_in_16_bits, cpu_flags
from accel.interfaces.fork_safety import kept_in_children
from accel.interfaces.layer_traces import LayerTrace
from accel.interfaces.protocols import Exporter, OpenRequest, Optimizer, Quantizer, Shapes
from accel.interfaces.specs import Probe, Reason

from .compiled_models import cached
from .int8_float_fallback import compute_in_float
from .options import properties
from .runtime import (
    READ_ERRORS,
    answers_masked_rows,
    core,
    device_name,
    devices,
    executing_device,
    one_line,
    read_model,
    reshape,
    usable_names,
)
from .session import OpenVinoSession

logger = logging.getLogger(__name__)


class OpenVinoBackend:
    """Runs OpenVINO IR and ONNX graphs."""

    def probe(self) -> Probe:
        """Return the devices that OpenVINO lists, and the device `auto`."""
        versions = {"openvino": ov.__version__}
        try:
            return Probe(devices=devices(), versions=versions)
        except RuntimeError as error:
            reason = Reason("runtime", f"OpenVINO lists no device: {one_line(error)}", "pip install -U openvino")
            return Probe(reasons=(reason,), versions=versions)

    def exporter(self) -> Exporter:
        """Return the exporter, which traces PyTorch models."""
        from .exporter import OpenVinoExporter

        return OpenVinoExporter(self.quantizer)

    def optimizer(self) -> Optimizer:
        """Return the optimizer, which converts ONNX to OpenVINO IR. OpenVINO optimizes a graph when it compiles it."""
        from .onnx_conversion import OnnxConverter

        return OnnxConverter()

    def quantizer(self) -> Quantizer:
        """Return the quantizer, which uses NNCF."""
        from .quantizer import NncfQuantizer

        return NncfQuantizer()

    def trace_layers(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, LayerTrace]:
        """Return the graphs with the values of their layers, on the CPU; see `TracingBackend`."""
        from .traced_layers import OpenVinoLayerTrace

        settings = properties("CPU", request.options, request.session, _compute_dtype(artifact, "CPU", request.session))
        settings.pop("CACHE_DIR", None)
        return {component.name: OpenVinoLayerTrace(artifact, component, settings) for component in artifact.components}

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, OpenVinoSession]:
        """Compile every component; see `accel.interfaces.protocols.Backend.open`. Takes 0.1 to 1 s for encoders."""
        name = device_name(request.device)
        settings = properties(name, request.options, request.session, _compute_dtype(artifact, name, request.session))
        folder = settings.pop("CACHE_DIR", None)
        if folder is not None and name.startswith("AUTO"):
            raise ConfigError(
                "OpenVINO cannot store compiled models for the device 'auto', so cache_dir cannot be used with this device.",
                fix="open the model on a specific device, such as device='cpu', or leave cache_dir out.",
            )
        sessions = {}
        for component in artifact.components:

            def compile_(component: Component = component) -> ov.CompiledModel:
                return _compile(artifact, component, name, settings, request.shapes)

            if folder is not None:
                compiled = cached(
                    Path(folder), artifact, component, device=name, settings=settings, shapes=request.shapes,
                    compile_=compile_,
                )  # fmt: skip
            else:
                compiled = compile_()
            sessions[component.name] = OpenVinoSession(
                compiled,
                component,
                executing_device(compiled, request.device),
                shapes=request.shapes,
                compile_again=compile_,
                masked_rows=answers_masked_rows(artifact, component),
                profile=request.session.profile,
            )
        return sessions


def _compute_dtype(artifact: Artifact, device: str, session: SessionOptions) -> str:
    """Return the data type for computation.

    This is the requested data type. If none is requested, it is the artifact's data type, or float32 if the device does
    not support the artifact's data type.

    Raises:
        ConfigError: The device does not support the requested data type, or has no fast int8 matrix products in
            combination with it.
    """
    dtype = session.compute_dtype or artifact.dtype
    if dtype == "float32":
        return dtype
    word = {"float16": "FP16", "bfloat16": "BF16"}[dtype]
    # The device `AUTO` may choose any of the usable devices, so all usable devices must support the data type.
    names = usable_names() if device.startswith("AUTO") else [device]
    supported = set.intersection(*(set(core().get_property(name, "OPTIMIZATION_CAPABILITIES")) for name in names))
    quantization = artifact.manifest.quantization
    slow = dtype == "float16" and "CPU" in names and quantization is not None and quantization.scheme == "static-int8"
    if word in supported and not slow:
        return dtype
    if word in supported and session.compute_dtype is not None:
        # OpenVINO would use its reference implementation, which is a thousand times slower and wrong for decoders.
        raise ConfigError(
            "The model is quantized with static-int8, and OpenVINO has no fast kernels for 8-bit products with "
            "compute_dtype='float16' on a CPU.",
            fix='use compute_dtype="float32" or "bfloat16", or leave compute_dtype out.',
        )
    if session.compute_dtype is not None:
        able = [ours for ours, w in (("float32", "FP32"), ("float16", "FP16"), ("bfloat16", "BF16")) if w in supported]
        raise ConfigError(
            f"The device {device} of this machine does not support compute_dtype={dtype!r}.",
            fix=f"use one of {', '.join(able)}.",
        )
    # OpenVINO would silently compute in bfloat16 if float16 is requested and not supported.
    return "float32"


def _compile(
    artifact: Artifact, component: Component, device: str, settings: Mapping[str, Any], shapes: Shapes
) -> ov.CompiledModel:
    """Read the graph, fix the axes in `shapes`, and compile it.

    Raises:
        ConfigError: OpenVINO rejects a setting.
        SessionError: OpenVINO cannot compile the graph.
    """
    model = read_model(artifact, component)
    if device.startswith(("CPU", "AUTO")) and adds_in_16_bits(cpu_flags()):
        compute_in_float(model, f"{artifact.path.name}/{component.file}")
    if shapes:
        reshape(model, component, shapes)
    try:
        return kept_in_children(core().compile_model(model, device, dict(settings)))
    except READ_ERRORS as error:
        text = one_line(error)
        if "roperty" in text or "option" in text:
            raise ConfigError(
                f"OpenVINO rejects a property: {text}", fix="check the names and the values of the options."
            ) from error
        raise SessionError(
            f"OpenVINO cannot compile {artifact.path} for {device}: {text}",
            fix="export the model again, or use the device 'cpu'.",
        ) from error
