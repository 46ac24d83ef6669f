"""A backend for any execution provider of ONNX Runtime: a spec, the provider's name, and what is particular to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import onnxruntime as ort

from accel.artifact import Artifact, Component
from accel.config import SessionOptions
from accel.errors import BackendUnavailableError, ConfigError, did_you_mean
from accel.interfaces.protocols import Exporter, OpenRequest, Optimizer, Quantizer
from accel.interfaces.specs import BackendSpec, DeviceSpec, Probe, Reason

from .runtime.libraries import device_specs, other_providers, provider_devices, register_library
from .runtime.session import OrtSession, for_float8, is_float8, open_session

_HALF = ("float16", "bfloat16")
# Smaller graphs are compared as they are run later, prepacked.
_LARGE_BYTES = 1 << 28
_WITHOUT_COPIES = {"session.disable_prepacking": "1", "enable_cpu_mem_arena": False}


def without_copies(session: SessionOptions) -> SessionOptions:
    """The options with which ONNX Runtime reads weights where they are mapped from the file, instead of copies in its kernels' layout:
    28 layers of RoBERTa (952 MB) open in 0.1 instead of 1.8 s with 27 instead of 786 MB of memory of their own. A call computes the
    same sums in another order (3e-7 apart), and takes half as long again.
    """
    return replace(session, native={**_WITHOUT_COPIES, **session.native})


class ProviderBackend:
    """A `Backend` made of what its spec says. A subclass sets `spec`, `provider` and `install`, and overrides what differs.

    The provider is in the build of ONNX Runtime, or in a library of its own (`library`). Inputs and outputs are on the
    host. A stage that the spec declares is done by ONNX Runtime's exporter, optimizer and quantizer; one that it does not
    declare, by nobody. Options that the spec's `run` capability lists are passed on; others are refused.

    Attributes:
        spec: What the backend says about itself.
        provider: ONNX Runtime's name of the execution provider.
        install: The command that installs a build (or a library) with the provider; the remedy where it is missing.
        kernel_dtype: The floating-point type that the kernels compute in whatever the graph's is; the graph's, when `None`.
        own_lengths: Whether the kernels' `GroupQueryAttention` takes a length for each row.
    """

    spec: ClassVar[BackendSpec]
    provider: ClassVar[str]
    install: ClassVar[str]
    kernel_dtype: ClassVar[str | None] = None
    own_lengths: ClassVar[bool] = False

    # What a provider may say

    def library(self) -> Path | None:
        """The provider's own library, for one that is not in ONNX Runtime's build: `None` for one that is.

        What this raises is a reason of the probe's, with `install` as its remedy.
        """
        return None

    def devices(self) -> tuple[DeviceSpec, ...]:
        """The devices of a provider in the build; asked once it was found there. Those of a library are its own."""
        return (DeviceSpec(self._run_types()[0]),)

    def provider_options(
        self, artifact: Artifact, component: Component, device: DeviceSpec, options: Mapping[str, object]
    ) -> Mapping[str, object]:
        """What the provider is told when it opens a component; `options` are the user's, with names that the spec lists.

        Raises:
            ConfigError: A value that cannot work.
        """
        return options

    def session_options(self, artifact: Artifact, session: SessionOptions) -> SessionOptions:
        """How to run an artifact: what the user said, and what its graphs need."""
        return for_float8(session, artifact)

    def disabled_optimizers(self, artifact: Artifact, component: Component) -> Sequence[str]:
        """ONNX Runtime's graph optimizers that are slow or wrong for the provider."""
        return ()

    def cpu_flags(self) -> Sequence[str]:
        """Instruction sets of the host that decide the preset of quantization (`avx512_vnni`, ...)."""
        return ()

    # The backend

    def probe(self) -> Probe:
        """The provider's devices, or why there are none. Never raises."""
        versions = {"onnxruntime": ort.__version__}
        try:
            devices, reason = self._found()
        except BackendUnavailableError as error:
            devices, reason = (), Reason("library", error.message, error.fix or self.install)
        # Foreign libraries in unknown states: whatever they raise is a reason, not a crash.
        except Exception as error:  # noqa: BLE001
            message = f"looking for its devices failed: {type(error).__name__}: {error}"
            devices, reason = (), Reason("probe-failed", message, self.install)
        return Probe(devices=devices, reasons=() if reason is None else (reason,), versions=versions)

    def exporter(self) -> Exporter | None:
        """ONNX, where the spec declares it."""
        if not self._does("export"):
            return None
        from .export.exporter import OnnxExporter

        return OnnxExporter(self.spec.name)

    def optimizer(self) -> Optimizer | None:
        """ONNX Runtime's fusions, where the spec declares levels of them."""
        capability = self.spec.capability("optimize", "onnx")
        if capability is None:
            return None
        from .optimization.fusions import CPU
        from .optimization.optimizer import OrtOptimizer

        halves = tuple(dtype for dtype in capability.dtypes if dtype in _HALF)
        return OrtOptimizer(self.spec.name, replace(CPU, half_dtypes=halves))

    def quantizer(self) -> Quantizer | None:
        """ONNX Runtime's schemes, where the spec declares any; the presets are chosen by `cpu_flags`."""
        if not self._does("quantize"):
            return None
        from .quantization.quantizer import OrtQuantizer

        return OrtQuantizer(self.spec.name, self.cpu_flags)

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, OrtSession]:
        """Open every component; see `accel.interfaces.protocols.Backend.open`.

        Raises:
            ConfigError: An option that the spec does not list, or another type to compute in than the kernels have.
            SessionError: ONNX Runtime refuses a graph.
            BackendUnavailableError: The provider did not load, or runs none of a graph's arithmetic.
        """
        self._check_options(request.options)
        computes = self._compute_dtype(artifact, request.session)
        devices = self._library_devices(request.device)
        return {
            component.name: open_session(
                artifact.path / component.file,
                component,
                device=request.device,
                provider=self.provider,
                provider_options=self.provider_options(artifact, component, request.device, request.options),
                options=self._session_options(artifact, request),
                compute_dtype=computes,
                disabled_optimizers=self.disabled_optimizers(artifact, component),
                shapes=request.shapes,
                devices=devices,
                model=self._with_lengths(artifact, component, request),
            )
            for component in artifact.components
        }

    def _session_options(self, artifact: Artifact, request: OpenRequest) -> SessionOptions:
        """How to run an artifact; for a few calls of a large one, with its weights where they are in the file."""
        options = self.session_options(artifact, request.session)
        # Kernels of integers take other ways where nothing is prepacked.
        if not request.few_calls or artifact.manifest.quantization is not None:
            return options
        return without_copies(options) if artifact.bytes >= _LARGE_BYTES else options

    def _with_lengths(self, artifact: Artifact, component: Component, request: OpenRequest) -> bytes | None:
        """The graph of a decoder whose rows may have lengths of their own, where the kernels know them and the graph allows it."""
        if not (self.own_lengths and component.stateful) or request.shapes:
            return None
        from .optimization.row_lengths import lengths_form

        return lengths_form(artifact.path / component.file)

    def _found(self) -> tuple[tuple[DeviceSpec, ...], Reason | None]:
        """Devices, or the reason why there is none."""
        path = self._loaded_library()
        if path is None:
            if self.provider in ort.get_available_providers():
                return self.devices(), None
            return (), Reason("provider", f"this ONNX Runtime build has no {self.provider}", self.install)
        found = device_specs(provider_devices(self.provider))
        # A library may list the host as well, for what it computes there; the spec says what is meant.
        devices = tuple(one for one in found if one.type in self._run_types())
        if devices:
            return devices, None
        others = other_providers(self.provider)
        if others:
            return (), Reason(
                "provider-name",
                f"{path.name} brought {', '.join(others)}, and no {self.provider}",
                f"set provider to {' or '.join(map(repr, others))} in the plugin",
            )
        have = ", ".join(map(str, found)) or "none"
        wanted = " or ".join(self._run_types())
        return (), Reason(
            "no-device",
            f"{path.name} found no device of type {wanted} for {self.provider} (devices: {have})",
            "check the device and its driver",
        )

    def _loaded_library(self) -> Path | None:
        """The provider's library, known to ONNX Runtime; `None` for a provider in the build.

        Raises:
            BackendUnavailableError: It is missing, or does not load.
        """
        try:
            path = self.library()
            if path is not None:
                register_library(self.provider, path)
        except BackendUnavailableError as error:
            raise BackendUnavailableError(error.message, fix=error.fix or self.install) from error
        # What a plugin does to find its library may fail in any way, mostly by an import.
        except Exception as error:
            raise BackendUnavailableError(
                f"{self.provider}: its library was not found: {type(error).__name__}: {error}",
                fix=self.install if isinstance(error, ImportError | OSError) else "report this to the plugin's author.",
            ) from error
        return path

    def _library_devices(self, device: DeviceSpec) -> tuple[ort.OrtEpDevice, ...]:
        """ONNX Runtime's own object for the device of a provider in a library; none for one in the build.

        Raises:
            BackendUnavailableError: The library does not load, or has no such device.
        """
        if self._loaded_library() is None:
            return ()
        found = provider_devices(self.provider)
        specs = device_specs(found)
        chosen = tuple(
            one
            for one, spec in zip(found, specs, strict=True)
            if (spec.type, spec.index) == (device.type, device.index)
        )
        if not chosen:
            raise BackendUnavailableError(
                f"{self.provider} has no device {device}, only {', '.join(map(str, specs)) or 'none'}.",
                fix="run `accel doctor`.",
            )
        return chosen

    def _check_options(self, options: Mapping[str, object]) -> None:
        capability = self.spec.capability("run")
        known = capability.options if capability is not None else ()
        unknown = [name for name in options if name not in known]
        if not unknown:
            return
        if not known:
            raise ConfigError(
                f"{self.provider} has no options of its own, not {sorted(unknown)}.",
                fix="pass ONNX Runtime's settings as session_options=SessionOptions(native={...}).",
            )
        raise ConfigError(
            f"{self.provider} has no option {unknown[0]!r}.{did_you_mean(unknown[0], known)}",
            fix=f"use one of {', '.join(known)}.",
        )

    def _compute_dtype(self, artifact: Artifact, session: SessionOptions) -> str:
        """What the kernels compute in."""
        floats = self.kernel_dtype or artifact.dtype
        if session.compute_dtype not in (None, floats):
            kernels = f"ONNX Runtime's {self.provider.removesuffix('ExecutionProvider')} kernels"
            raise ConfigError(
                f"{kernels} compute in {floats}, not in {session.compute_dtype}.",
                fix="leave compute_dtype out, or use another backend (`accel doctor` lists them).",
            )
        return "int8" if artifact.manifest.quantization and not is_float8(artifact) else floats

    def _does(self, stage: Any) -> bool:
        return any(one.stage == stage and "onnx" in (one.consumes, one.produces) for one in self.spec.capabilities)

    def _run_types(self) -> tuple[str, ...]:
        """Device types that the spec runs on."""
        return tuple(
            dict.fromkeys(kind for one in self.spec.capabilities if one.stage == "run" for kind in one.devices)
        )
