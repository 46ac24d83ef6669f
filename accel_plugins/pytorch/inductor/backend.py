"""Opens transformers models as sessions that run compiled code, and accelerates models where they are."""

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
from .accelerator import Accelerator
from .compilation import REMEDIES, cpu_compiler, gpu_compiler
from .compiled_model import CompiledModel
from .steps import CompiledStepsSession


class InductorBackend(PytorchBackend):
    """Runs models through PyTorch's compiler."""

    name = "inductor"
    options = ("quantization", "graphs", "cuda_graph", "packing", "freezing", "keep_slower")

    def probe(self) -> Probe:
        """PyTorch's devices, as far as code can be compiled for them."""
        found = super().probe()
        able = {"cpu": cpu_compiler() is not None, "cuda": gpu_compiler()}
        reasons = [
            Reason("no-compiler", f"nothing here compiles code for {kind}", REMEDIES[kind])
            for kind in sorted({device.type for device in found.devices})
            if not able[kind]
        ]
        versions = dict(found.versions)
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
        devices = tuple(device for device in found.devices if able[device.type])
        return Probe(devices=devices, reasons=tuple(reasons), versions=versions)

    def preparer(self) -> Preparer:
        """Accelerates models where they are."""
        return Accelerator()

    def exporter(self) -> Exporter | None:
        """None: PyTorch's own backend writes the format."""
        return None

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Open the parts of a model; compiled when they are called, see `accel.interfaces.protocols.Backend.open`.

        Args:
            artifact: PyTorch weights.
            request: `options` are fields of `AccelerateConfig`: `quantization`, `graphs`, `cuda_graph`, `packing`, `freezing`,
                `keep_slower`.

        Raises:
            ConfigError: An option that there is not, or a model whose steps are not compiled.
        """
        stateful = [component for component in artifact.components if component.stateful]
        if stateful:
            _check_steps(artifact, request)
        return super().open(artifact, request)

    def decoder(self, model: Any, part: Source, component: Component, request: OpenRequest, dtype: str) -> Session:
        """A decoder that computes steps with compiled code."""
        graphs = _config(request).graphs
        return CompiledStepsSession(model, part, component, request.device, dtype, forms=graphs)

    def check(self, request: OpenRequest) -> None:
        """Refuse options that there are not; see `PytorchBackend.check`."""
        super().check(replace(request, options={k: v for k, v in request.options.items() if k != "cuda_graph"}))
        _config(request)

    def module(self, model: torch.nn.Module, request: OpenRequest) -> Module:
        """The model through compiled code."""
        return CompiledModel(model, model.forward, _config(request), owned=True)


def _check_steps(artifact: Artifact, request: OpenRequest) -> None:
    """Refuse decoders whose steps are not compiled.

    Raises:
        ConfigError: With what opens them.
    """
    instead = "load the model with transformers and call accel.accelerate(model), or use backend='pytorch'."
    if request.device.type != "cuda":
        raise ConfigError(
            f"The backend 'inductor' opens decoders on NVIDIA GPUs, not on {request.device}.",
            fix=f"pass device='cuda' (--device), or {instead}",
        )
    if len(artifact.components) > 1 or not artifact.components[0].croppable:
        raise ConfigError(
            f"The backend 'inductor' opens decoders that keep keys and values of each token, and nothing else; {artifact.task} of "
            "this model needs more.",
            fix=instead,
        )
    if request.options.get("quantization"):
        raise ConfigError("The backend 'inductor' computes decoders in their own type.", fix="leave quantization out.")


def _config(request: OpenRequest) -> AccelerateConfig:
    lengths = (request.shapes["sequence"],) if "sequence" in request.shapes else None
    return AccelerateConfig.from_dict({**request.options, "lengths": lengths})
