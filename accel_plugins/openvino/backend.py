"""OpenVINO's devices."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openvino as ov

from accel.artifact import Artifact, Component
from accel.config import SessionOptions
from accel.errors import ConfigError, SessionError, TargetMismatchError
from accel.interfaces.cpu_features import adds_in_16_bits, cpu_flags
from accel.interfaces.forks import kept_in_children
from accel.interfaces.protocols import Exporter, OpenRequest, Optimizer, Quantizer, Shapes
from accel.interfaces.specs import Probe, Reason

from .compiled_models import cached
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
from .saturation import compute_in_float
from .session import OpenVinoSession

logger = logging.getLogger(__name__)


class OpenVinoBackend:
    """Runs OpenVINO IR and ONNX graphs."""

    def probe(self) -> Probe:
        """The devices that OpenVINO lists, and `auto`."""
        versions = {"openvino": ov.__version__}
        try:
            return Probe(devices=devices(), versions=versions)
        except RuntimeError as error:
            reason = Reason("runtime", f"OpenVINO lists no device: {one_line(error)}", "pip install -U openvino")
            return Probe(reasons=(reason,), versions=versions)

    def exporter(self) -> Exporter:
        """Captures from torch."""
        from .exporter import OpenVinoExporter

        return OpenVinoExporter()

    def optimizer(self) -> Optimizer:
        """Converts ONNX; the rest OpenVINO does when it compiles a graph."""
        from .optimizer import OnnxConverter

        return OnnxConverter()

    def quantizer(self) -> Quantizer:
        """NNCF."""
        from .quantizer import NncfQuantizer

        return NncfQuantizer()

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, OpenVinoSession]:
        """Compile every component; see `accel.interfaces.protocols.Backend.open`. Takes 0.1 to 1 s for encoders."""
        name = device_name(request.device)
        settings = properties(name, request.options, request.session, _compute_dtype(artifact, name, request.session))
        folder = settings.pop("CACHE_DIR", None)
        if folder is not None and name.startswith("AUTO"):
            raise ConfigError(
                "OpenVINO cannot write down what it compiled for the device 'auto'.",
                fix="use the device that it takes, such as 'cpu', or leave cache_dir out.",
            )
        sessions = {}
        for component in artifact.components:

            def compile_(component: Component = component) -> ov.CompiledModel:
                if artifact.manifest.target is not None:
                    return _import(artifact, component, name, settings)
                return _compile(artifact, component, name, settings, request.shapes)

            if artifact.manifest.target is None and folder is not None:
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
    """What to compute in: as asked, else the artifact's dtype, or float32 where the device does not have that.

    Raises:
        ConfigError: The device does not compute in the dtype asked for, or not in 8 bits beside it.
    """
    wanted = session.compute_dtype or artifact.dtype
    if wanted == "float32":
        return wanted
    word = {"float16": "FP16", "bfloat16": "BF16"}[wanted]
    # `AUTO` may take any of them.
    names = usable_names() if device.startswith("AUTO") else [device]
    have = set.intersection(*(set(core().get_property(name, "OPTIMIZATION_CAPABILITIES")) for name in names))
    made = artifact.manifest.quantization
    slow = wanted == "float16" and "CPU" in names and made is not None and made.scheme == "static-int8"
    if word in have and not slow:
        return wanted
    if word in have and session.compute_dtype is not None:
        # Reference code: a thousand times slower than others, and wrong for decoders.
        raise ConfigError(
            "OpenVINO has no kernels of its own for 8-bit products in float16 on a CPU.",
            fix='use "float32" or "bfloat16", or leave compute_dtype out.',
        )
    if session.compute_dtype is not None:
        able = [ours for ours, w in (("float32", "FP32"), ("float16", "FP16"), ("bfloat16", "BF16")) if w in have]
        raise ConfigError(f"{device} does not compute in {wanted} here.", fix=f"use one of {', '.join(able)}.")
    # OpenVINO would take bfloat16 for float16 without a word.
    return "float32"


def _compile(
    artifact: Artifact, component: Component, device: str, settings: Mapping[str, Any], shapes: Shapes
) -> ov.CompiledModel:
    """Read the graph, fix the axes in `shapes`, compile.

    Raises:
        ConfigError: OpenVINO refuses a setting.
        SessionError: It refuses the graph.
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
            raise ConfigError(f"OpenVINO refuses a setting: {text}", fix="check the options' values.") from error
        raise SessionError(
            f"OpenVINO cannot compile {artifact.path} for {device}: {text}",
            fix="export the model again, or use the device 'cpu'.",
        ) from error


def _import(artifact: Artifact, component: Component, device: str, settings: Mapping[str, Any]) -> ov.CompiledModel:
    """A model that was compiled before, for this device by this OpenVINO.

    Raises:
        TargetMismatchError: It was compiled for another.
    """
    target, here = artifact.manifest.target, {"device": device, "openvino": ov.__version__}
    if target != here:
        raise TargetMismatchError(f"{artifact.path} was compiled for {target}; this is {here}.", fix="export it again.")
    with (artifact.path / component.file).open("rb") as file:
        try:
            return kept_in_children(core().import_model(io.BytesIO(file.read()), device, dict(settings)))
        except RuntimeError as error:
            raise SessionError(
                f"OpenVINO cannot load {file.name}: {one_line(error)}", fix="export it again."
            ) from error
