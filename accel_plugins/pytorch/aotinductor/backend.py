"""The backend `aotinductor`: exports models as packages of compiled code (.pt2) and opens the packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from accel.artifact import Artifact, Component
from accel.errors import ConfigError
from accel.interfaces.protocols import Exporter, OpenRequest, Session
from accel.interfaces.specs import Probe

from ..backend import PytorchBackend
from ..session import Module, ModuleSession
from .exporter import PackageExporter
from .packages import check_target, opened, trusted


class AotInductorBackend(PytorchBackend):
    """Backend that runs packages of compiled code (`.pt2`). It supports the session settings of the `pytorch` backend
    and has no options.
    """

    name = "aotinductor"
    options = ()

    def probe(self) -> Probe:
        """Return the CPU as the only device. A compiler is not required, because opening a package compiles nothing."""
        probe = super().probe()
        return replace(probe, devices=tuple(device for device in probe.devices if device.type == "cpu"))

    def exporter(self) -> Exporter:
        """Return the exporter, which traces a model and compiles it into packages."""
        return PackageExporter()

    def preparer(self) -> None:
        """Return `None`, because this backend does not prepare models for training or acceleration."""

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Load the compiled code of each component; see `accel.interfaces.protocols.Backend.open`. Nothing is compiled.

        Args:
            artifact: An artifact of compiled packages (format `pt2`).
            request: The device and session settings. `options` must be empty.

        Raises:
            ConfigError: The code was compiled on another machine and `trust_remote_code` is False, or a setting of the
                request is not supported.
            TargetMismatchError: The code was compiled for another processor or another PyTorch version.
        """
        self.check(request)
        dtype = request.session.compute_dtype or artifact.dtype
        if dtype != artifact.dtype:
            raise ConfigError(
                f"{artifact.path} was compiled to compute in {artifact.dtype}, so compute_dtype={dtype!r} is not possible.",
                fix=f"leave compute_dtype out, or export the model again with dtype={dtype!r}.",
            )
        check_target(artifact)
        if request.session.threads is not None:
            torch.set_num_threads(request.session.threads)
        sessions: dict[str, Session] = {}
        for component in artifact.components:
            with trusted(artifact.path / component.file, trust_remote_code=request.trust_remote_code) as package:
                module = _module(opened(package), component)
            sessions[component.name] = ModuleSession(module, component, request.device, dtype, request.shapes)
        return sessions


def _module(package: Any, component: Component) -> Module:
    """Return a callable that runs a package with named input and output tensors."""
    inputs = tuple(spec.name for spec in component.inputs)
    outputs = tuple(spec.name for spec in component.outputs)

    def run(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(outputs, package.run([tensors[name].contiguous() for name in inputs]), strict=True))

    return run
