"""The backend `pytorch`: opens transformers models as sessions."""

from __future__ import annotations

import platform
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers

from accel.artifact import Artifact, Component, HubOptions, Location
from accel.capture import Source, load_source, split
from accel.config import ExportConfig, SessionOptions, check_type
from accel.errors import ConfigError, did_you_mean
from accel.interfaces.protocols import Exporter, OpenRequest, Optimizer, Preparer, Quantizer, Session
from accel.interfaces.specs import DeviceSpec, Probe

from .decoder_session import ModuleDecoderSession
from .exporter import WeightsExporter, describe
from .session import CapturedModule, Module, ModuleSession


class _AdoptedModel(threading.local):
    """Model that `adopt` loaded last in this thread, with its folder, task and settings.

    `open` usually opens the same model right after `adopt`. Reusing the loaded model saves seconds.
    """

    model: tuple[tuple[Path, str, ExportConfig], Source] | None = None


class PytorchBackend:
    """Backend that runs models in PyTorch's eager mode, or replays one CUDA graph per input shape (option
    `cuda_graph`).
    """

    name = "pytorch"
    options: tuple[str, ...] = ("cuda_graph",)
    _handed_over: ClassVar[_AdoptedModel] = _AdoptedModel()

    def probe(self) -> Probe:
        """Return the CPU and the NVIDIA GPUs that this build of PyTorch finds."""
        devices = [DeviceSpec("cpu", name=platform.processor() or platform.machine())]
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(
                DeviceSpec(
                    "cuda",
                    index,
                    name=properties.name,
                    arch=f"sm_{properties.major}{properties.minor}",
                    memory_bytes=properties.total_memory,
                )
            )
        return Probe(
            devices=tuple(devices), versions={"torch": torch.__version__, "transformers": transformers.__version__}
        )

    def exporter(self) -> Exporter | None:
        """Return the exporter, which saves a model with `save_pretrained`."""
        return WeightsExporter()

    def optimizer(self) -> Optimizer | None:
        """Return `None`: this backend has no optimizer."""
        return None

    def quantizer(self) -> Quantizer | None:
        """Return `None`: this backend has no quantizer."""
        return None

    def preparer(self) -> Preparer | None:
        """Return the preparer for quantization-aware training."""
        from .training import TrainingPreparer

        return TrainingPreparer()

    def adopt(self, folder: Path, *, task: str, config: ExportConfig, trust_remote_code: bool = False) -> Artifact:
        """Describe a transformers model folder as an artifact; no file is written. The loaded model is kept for the
        next call of `open`.
        """
        source = _load(folder, task, config, trust_remote_code)
        self._handed_over.model = (folder, source.task, replace(config, atol=None)), source
        return describe(source, folder, config)

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Load the model and open a session for each of its components; see `accel.interfaces.protocols.Backend.open`.

        Args:
            artifact: An artifact of PyTorch weights.
            request: The device (CPU or GPU), options and settings. The option `cuda_graph` replays one CUDA graph per
                input shape on a GPU, which saves the time to launch each kernel. The session settings are `threads`,
                which applies to the whole process, and `compute_dtype`. `shapes` are only checked: fixed shapes do not
                make eager PyTorch faster. `trust_remote_code` allows code that comes with the model to run.

        Raises:
            ConfigError: PyTorch does not have an option of the request, or `cuda_graph` is used on the CPU.
        """
        adopted, self._handed_over.model = self._handed_over.model, None
        self.check(request)
        settings = next((step.config for step in artifact.manifest.steps if step.stage == "export"), {})
        dtype = request.session.compute_dtype or artifact.dtype
        config = ExportConfig.from_dict({**settings, "dtype": dtype, "atol": None})
        if request.session.threads is not None:
            torch.set_num_threads(request.session.threads)
        if adopted is not None and adopted[0] == (artifact.path, artifact.task, config):
            source = adopted[1]
        else:
            source = _load(artifact.path, artifact.task, config, request.trust_remote_code)
        device = torch.device(str(request.device))
        # `split` runs on the CPU, because the sample inputs are on the CPU. The parts share the weights of one model,
        # so the model is moved to the device once, after `split`.
        parts = split(source)
        source.model.to(device)
        sessions: dict[str, Session] = {}
        for part in parts:
            part.model.to(device)
            component = artifact.component(part.name)
            if part.stateful:
                sessions[part.name] = self.decoder(source.model, part, component, request, dtype)
                continue
            module = self.module(part.model, request)
            sessions[part.name] = ModuleSession(module, component, request.device, dtype, request.shapes)
        return sessions

    def check(self, request: OpenRequest) -> None:
        """Raise if the request has options or session settings that this backend does not have.

        Raises:
            ConfigError: The backend does not have an option or a session setting of the request.
        """
        for name in request.options:
            if name not in self.options:
                raise ConfigError(
                    f"The backend {self.name!r} has no option {name!r}.{did_you_mean(name, self.options)}",
                    fix=f"use one of the options {', '.join(self.options)}, or leave {name} out."
                    if self.options
                    else f"leave {name} out; this backend has no options.",
                )
        check_type("cuda_graph", request.options.get("cuda_graph", False), (bool,))
        if request.options.get("cuda_graph") and request.device.type != "cuda":
            raise ConfigError(
                f"The option cuda_graph=True needs an NVIDIA GPU, but the device of this session is {request.device}.",
                fix="pass device='cuda' (--device cuda), or leave cuda_graph out.",
            )
        default = SessionOptions()
        for name in ("native", "profile", "graph_optimization"):
            if getattr(request.session, name) != getattr(default, name):
                raise ConfigError(
                    f"The backend {self.name!r} does not support SessionOptions.{name}.",
                    fix=f"leave {name} out of the session options.",
                )

    def module(self, model: torch.nn.Module, request: OpenRequest) -> Module:
        """Return the module that runs a component without a KV cache."""
        return CapturedModule(model, torch.device(str(request.device))) if request.options.get("cuda_graph") else model

    def decoder(self, model: Any, part: Source, component: Component, request: OpenRequest, dtype: str) -> Session:
        """Return the session that runs a component with a KV cache."""
        return ModuleDecoderSession(model, part, component, request.device, dtype)


def _load(folder: Path, task: str, config: ExportConfig, trust_remote_code: bool) -> Source:
    hub = HubOptions(local_files_only=True, trust_remote_code=trust_remote_code)
    return load_source(Location(str(folder), folder), task=task, config=config, hub=hub)
