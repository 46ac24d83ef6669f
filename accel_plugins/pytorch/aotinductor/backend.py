"""Exports models as packages of compiled code, and opens them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from accel.artifact import Artifact, Component
from accel.errors import ConfigError
from accel.interfaces.protocols import Exporter, OpenRequest, Optimizer, Preparer, Quantizer, Session
from accel.interfaces.specs import Probe

from ..backend import PytorchBackend
from ..session import Module, ModuleSession
from .exporter import PackageExporter
from .packages import check_target, opened, trusted


class _Runtime(PytorchBackend):
    """PyTorch's settings, without options."""

    name = "aotinductor"
    options = ()


class AotInductorBackend:
    """Runs packages of compiled code."""

    def __init__(self) -> None:
        self._runtime = _Runtime()

    def probe(self) -> Probe:
        """The host: opening a package needs no compiler."""
        found = self._runtime.probe()
        return replace(found, devices=tuple(device for device in found.devices if device.type == "cpu"))

    def exporter(self) -> Exporter:
        """Traces and compiles."""
        return PackageExporter()

    def optimizer(self) -> Optimizer | None:
        """None."""
        return None

    def quantizer(self) -> Quantizer | None:
        """None."""
        return None

    def preparer(self) -> Preparer | None:
        """None."""
        return None

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Load the code of every part; see `accel.interfaces.protocols.Backend.open`. Nothing is compiled.

        Args:
            artifact: Packages.
            request: There are no `options`.

        Raises:
            ConfigError: Code of somebody else that is not trusted, or settings that compiled code cannot have.
            TargetMismatchError: It was compiled for another processor or PyTorch.
        """
        self._runtime.check(request)
        dtype = request.session.compute_dtype or artifact.dtype
        if dtype != artifact.dtype:
            raise ConfigError(
                f"{artifact.path} was compiled to compute in {artifact.dtype}, not in {dtype}.",
                fix=f"leave compute_dtype out, or export it with dtype={dtype!r}.",
            )
        check_target(artifact)
        if request.session.threads is not None:
            torch.set_num_threads(request.session.threads)
        sessions: dict[str, Session] = {}
        for component in artifact.components:
            with trusted(artifact.path / component.file, trust_remote_code=request.trust_remote_code) as package:
                module: Module = _Package(opened(package), component)
            sessions[component.name] = ModuleSession(module, component, request.device, dtype, request.shapes)
        return sessions


class _Package:
    """A package as a module: named tensors in and out."""

    def __init__(self, loader: Any, component: Component) -> None:
        self._loader = loader
        self._inputs = tuple(spec.name for spec in component.inputs)
        self._outputs = tuple(spec.name for spec in component.outputs)

    def __call__(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute."""
        found = self._loader.run([tensors[name].contiguous() for name in self._inputs])
        return dict(zip(self._outputs, found, strict=True))
