"""The backend `inductor`: opens transformers models as sessions that run compiled code, and accelerates models in
place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch

from accel.artifact import Artifact, Component
from accel.capture import Source
from accel.config import AccelerateConfig
from accel.errors import ConfigError
from accel.interfaces.protocols import Exporter, OpenRequest, Preparer, Session
from accel.interfaces.specs import Probe, Reason

from ..backend import PytorchBackend
from ..session import Module
from ..upstream import cpp_compiler
from .accelerator import Accelerator
from .compilation import REMEDIES, gpu_compiler
from .compiled_model import CompiledModel
from .precision import check_quantization, quantize_layers
from .steps import CompiledStepsSession


class InductorBackend(PytorchBackend):
    """Backend that runs models with code from PyTorch's compiler."""

    name = "inductor"
    options = ("quantization", "graphs", "cuda_graph", "packing", "freezing", "keep_slower")

    def probe(self) -> Probe:
        """Return the devices for which code can be compiled, and the reasons why other devices are missing."""
        probe = super().probe()
        compilable = {"cpu": cpp_compiler() is not None, "cuda": gpu_compiler()}
        reasons = [
            Reason("no-compiler", f"no compiler for code on {kind!r} devices is installed", REMEDIES[kind])
            for kind in sorted({device.type for device in probe.devices})
            if not compilable[kind]
        ]
        versions = dict(probe.versions)
        try:
            versions["torchao"] = metadata.version("torchao")
        except metadata.PackageNotFoundError:
            reasons.append(
                Reason(
                    "no-torchao",
                    "quantization='int8' needs torchao, which is not installed",
                    'pip install "accel-transformers[inductor]"',
                )
            )
        devices = tuple(device for device in probe.devices if compilable[device.type])
        return Probe(devices=devices, reasons=tuple(reasons), versions=versions)

    def preparer(self) -> Preparer:
        """Return the preparer that accelerates models in place."""
        return Accelerator()

    def exporter(self) -> Exporter | None:
        """Return `None`, because the backend `pytorch` exports the artifacts that this backend opens."""
        return None

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Open a session for each component of a model; see `accel.interfaces.protocols.Backend.open`. The first call
        of a session compiles the code.

        Args:
            artifact: An artifact of PyTorch weights.
            request: The device and settings. `options` are fields of `AccelerateConfig`: `quantization`, `graphs`,
                `cuda_graph`, `packing`, `freezing`, `keep_slower`.

        Raises:
            ConfigError: An option is unknown, or the decoding steps of the model cannot be compiled.
        """
        stateful = [component for component in artifact.components if component.stateful]
        if stateful:
            _check_steps(artifact, request)
        return super().open(artifact, request)

    def decoder(self, model: Any, part: Source, component: Component, request: OpenRequest, dtype: str) -> Session:
        """Return a decoder session that computes decoding steps with compiled code."""
        config = _config(request)
        if config.quantization is not None:
            quantize_layers(model, config.quantization)
        return CompiledStepsSession(model, part, component, request.device, dtype, forms=config.graphs)

    def check(self, request: OpenRequest) -> None:
        """Raise if an option is unknown; see `PytorchBackend.check`."""
        super().check(replace(request, options={k: v for k, v in request.options.items() if k != "cuda_graph"}))
        _config(request)

    def module(self, model: torch.nn.Module, request: OpenRequest) -> Module:
        """Return the compiled version of a model."""
        return CompiledModel(model, model.forward, _config(request), owned=True)


def _check_steps(artifact: Artifact, request: OpenRequest) -> None:
    """Raise if the decoding steps of a model cannot be compiled.

    Raises:
        ConfigError: The decoding steps cannot be compiled; the message describes another way to run the model.
    """
    instead = "load the model with transformers and call accel.accelerate(model), or use backend='pytorch'."
    if request.device.type != "cuda":
        raise ConfigError(
            f"The backend 'inductor' runs models that generate text only on NVIDIA GPUs, not on {request.device}.",
            fix=f"pass device='cuda' (--device cuda), or {instead}",
        )
    if len(artifact.components) > 1 or not artifact.components[0].croppable:
        raise ConfigError(
            f"The backend 'inductor' supports only decoders whose KV cache stores keys and values of every token. This model for the "
            f"task {artifact.task!r} has other components, or states of another kind.",
            fix=instead,
        )
    quantization = request.options.get("quantization")
    if quantization == "int4":
        dtype = getattr(torch, request.session.compute_dtype or artifact.dtype)
        check_quantization(quantization, torch.device(str(request.device)), dtype)
    elif quantization:
        raise ConfigError(
            f"The backend 'inductor' does not support quantization={quantization!r} for models that generate text.",
            fix="use quantization='int4', or leave quantization out.",
        )


def _config(request: OpenRequest) -> AccelerateConfig:
    lengths = (request.shapes["sequence"],) if "sequence" in request.shapes else None
    return AccelerateConfig.from_dict({**request.options, "lengths": lengths})
