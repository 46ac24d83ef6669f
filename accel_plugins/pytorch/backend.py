"""Opens transformers models as sessions."""

from __future__ import annotations

import platform
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers

from accel.artifact import Artifact, Component, HubOptions, Location
from accel.capture import Source, load_source, split
from accel.config import ExportConfig, SessionOptions
from accel.errors import ConfigError, did_you_mean
from accel.interfaces.protocols import Exporter, OpenRequest, Optimizer, Preparer, Quantizer, Session
from accel.interfaces.specs import DeviceSpec, Probe

from .decoder_session import ModuleDecoderSession
from .exporter import WeightsExporter, describe
from .session import CapturedModule, Module, ModuleSession


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A model in memory, and which one it is."""

    folder: Path
    config: ExportConfig
    source: Source

    def is_of(self, artifact: Artifact, config: ExportConfig) -> bool:
        """Whether it is this artifact's model, in this type."""
        same = {**self.config.to_dict(), "atol": None} == config.to_dict()
        return same and (self.folder, self.source.task) == (artifact.path, artifact.task)


class _HandedOver(threading.local):
    """What this thread described last: whoever describes weights opens them next, with this backend or one derived from it, and
    reading them twice takes seconds.
    """

    loaded: _Loaded | None = None


class PytorchBackend:
    """Runs models eagerly; on request replayed from a CUDA graph for each shape."""

    name = "pytorch"
    options: tuple[str, ...] = ("cuda_graph",)
    _handed_over: ClassVar[_HandedOver] = _HandedOver()

    def probe(self) -> Probe:
        """The host, and the NVIDIA GPUs that this build of PyTorch finds."""
        devices = [DeviceSpec("cpu", name=platform.processor() or platform.machine())]
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            devices.append(
                DeviceSpec(
                    "cuda",
                    index,
                    name=found.name,
                    arch=f"sm_{found.major}{found.minor}",
                    memory_bytes=found.total_memory,
                )
            )
        return Probe(
            devices=tuple(devices), versions={"torch": torch.__version__, "transformers": transformers.__version__}
        )

    def exporter(self) -> Exporter | None:
        """Saves the model in transformers' own layout."""
        return WeightsExporter()

    def optimizer(self) -> Optimizer | None:
        """None."""
        return None

    def quantizer(self) -> Quantizer | None:
        """None."""
        return None

    def preparer(self) -> Preparer:
        """Quantization-aware training."""
        from .training import TrainingPreparer

        return TrainingPreparer()

    def adopt(self, folder: Path, *, task: str, config: ExportConfig, trust_remote_code: bool = False) -> Artifact:
        """A transformers folder as an artifact; nothing is written. Reads the weights, and keeps them for `open`."""
        source = _load(folder, task, config, trust_remote_code)
        self._handed_over.loaded = _Loaded(folder=folder, config=config, source=source)
        return describe(source, folder, config)

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Load the model and open its parts; see `accel.interfaces.protocols.Backend.open`.

        Args:
            artifact: PyTorch weights.
            device: The host or a GPU.
            options: `cuda_graph`: on a GPU, replay a captured graph for each shape, which launches kernels without the host.
            session: `threads` and `compute_dtype`; PyTorch has one thread pool for the whole process.
            shapes: Only checked: eager PyTorch gains nothing from fixed shapes.
            trust_remote_code: Run code that comes with the model.

        Raises:
            ConfigError: An option that PyTorch does not have, or a CUDA graph on the host.
        """
        loaded, self._handed_over.loaded = self._handed_over.loaded, None
        self.check(request)
        recorded = next((step.config for step in artifact.manifest.steps if step.stage == "export"), {})
        dtype = request.session.compute_dtype or artifact.dtype
        config = ExportConfig.from_dict({**recorded, "dtype": dtype, "atol": None})
        if request.session.threads is not None:
            torch.set_num_threads(request.session.threads)
        if loaded is not None and loaded.is_of(artifact, config):
            source = loaded.source
        else:
            source = _load(artifact.path, artifact.task, config, request.trust_remote_code)
        where = torch.device(str(request.device))
        # Taken apart on the host, where what it is asked lies; the parts are one model, which moves as a whole.
        parts = split(source)
        source.model.to(where)
        opened: dict[str, Session] = {}
        for part in parts:
            part.model.to(where)
            component = artifact.component(part.name)
            if part.stateful:
                opened[part.name] = self.decoder(source.model, part, component, request, dtype)
                continue
            module = self.module(part.model, request)
            opened[part.name] = ModuleSession(module, component, request.device, dtype, request.shapes)
        return opened

    def check(self, request: OpenRequest) -> None:
        """Refuse what this backend does not have.

        Raises:
            ConfigError: An option, or a setting of sessions.
        """
        for name in request.options:
            if name not in self.options:
                raise ConfigError(
                    f"The backend {self.name!r} has no option {name!r}.{did_you_mean(name, self.options)}",
                    fix=f"use {' or '.join(self.options)}, or leave it out.",
                )
        if request.options.get("cuda_graph") and request.device.type != "cuda":
            raise ConfigError(
                f"A CUDA graph needs an NVIDIA GPU, and PyTorch runs on {request.device} here.",
                fix="pass device='cuda' (--device).",
            )
        default = SessionOptions()
        for name in ("native", "profile", "graph_optimization"):
            if getattr(request.session, name) != getattr(default, name):
                raise ConfigError(f"PyTorch has no setting for SessionOptions.{name}.", fix="leave it out.")

    def module(self, model: torch.nn.Module, request: OpenRequest) -> Module:
        """What runs a part without a state."""
        return CapturedModule(model, torch.device(str(request.device))) if request.options.get("cuda_graph") else model

    def decoder(self, model: Any, part: Source, component: Component, request: OpenRequest, dtype: str) -> Session:
        """What runs a part with a state."""
        return ModuleDecoderSession(model, part, component, request.device, dtype)


def _load(folder: Path, task: str, config: ExportConfig, trust_remote_code: bool) -> Source:
    hub = HubOptions(local_files_only=True, trust_remote_code=trust_remote_code)
    return load_source(Location(str(folder), folder), task=task, config=config, hub=hub)
