"""Base class of backends for ONNX Runtime execution providers: a spec, the provider's name, and methods to override."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import onnxruntime as ort

from accel.artifact import Artifact, Component
from accel.config import SessionOptions
from accel.errors import BackendUnavailableError, ConfigError
from accel.interfaces.layer_traces import LayerTrace
from accel.interfaces.protocols import Exporter, OpenRequest, Optimizer, Quantizer
from accel.interfaces.specs import BackendSpec, DeviceSpec, Probe, Reason

from .runtime.huge_pages import weights_in_huge_pages
from .runtime.nvidia import check_option_names
from .runtime.plugin_providers import device_specs, other_providers, provider_devices, register_library
from .runtime.provider_assignment import CPU
from .runtime.session import OrtSession, for_float8, is_float8, open_runtime

_HALF = ("float16", "bfloat16")
# Smaller graphs keep prepacking, so that accel compares them with the kernels that run them later.
_LARGE_BYTES = 1 << 28
_WITHOUT_COPIES = {"session.disable_prepacking": "1", "enable_cpu_mem_arena": False}


def without_copies(session: SessionOptions) -> SessionOptions:
    """Return session options with which ONNX Runtime reads weights from the memory-mapped file.

    By default, ONNX Runtime copies weights into the layout of its kernels. Without the copies, a session with 28 layers
    of RoBERTa (952 MB) opens in 0.1 s instead of 1.8 s and uses 27 MB of private memory instead of 786 MB. However, a
    call takes 1.5 times as long, and results differ by 3e-7, because the kernels add products in another order.
    """
    return replace(session, native={**_WITHOUT_COPIES, **session.native})


class ProviderBackend:
    """A `Backend` that is defined by its spec.

    A subclass sets `spec`, `provider` and `install`, and overrides methods as needed.

    The execution provider is part of the ONNX Runtime build, or comes in a separate library (`library`). Inputs and
    outputs are in CPU memory. ONNX Runtime's exporter, optimizer and quantizer run the stages that the spec declares.
    The backend passes options to the provider if the spec's `run` capability lists them; other options raise an error.

    Attributes:
        spec: The backend's spec.
        provider: ONNX Runtime's name of the execution provider.
        install: The command that installs a build or a library with the provider; error messages show the command if
            the provider is missing.
        kernel_dtype: The floating-point type in which the kernels compute every graph. `None` means the data type of
            the graph.
        device_types: Names of the provider's device types, for types whose name in `accel` differs from the name in ONNX
            Runtime, such as `{"gpu": "cuda"}`.
        own_lengths: Whether the provider's `GroupQueryAttention` kernel accepts a different length for each row of the
            batch.
    """

    spec: ClassVar[BackendSpec]
    provider: ClassVar[str]
    install: ClassVar[str]
    kernel_dtype: ClassVar[str | None] = None
    device_types: ClassVar[Mapping[str, str]] = {}
    own_lengths: ClassVar[bool] = False

    # A subclass may override the following methods.

    def library(self) -> Path | None:
        """Return the path of the provider's library, or `None` when the provider is part of the ONNX Runtime build.

        If this method raises an exception, `probe` reports the exception as the reason why the provider is not
        available, and `install` as the fix.
        """
        return None

    def devices(self) -> tuple[DeviceSpec, ...]:
        """Return the devices of a provider that is part of the ONNX Runtime build.

        This method is not called if the build lacks the provider, or if the provider comes in a separate library: ONNX
        Runtime lists the devices of such a library.
        """
        return (DeviceSpec(self._run_types()[0]),)

    def provider_options(
        self, artifact: Artifact, component: Component, device: DeviceSpec, options: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Return the provider options for opening a component.

        Args:
            artifact: The artifact.
            component: The component that is opened.
            device: The device that the component runs on.
            options: The user's options; the spec lists all of their names.

        Raises:
            ConfigError: The value of an option is invalid.
        """
        return options

    def session_options(self, artifact: Artifact, session: SessionOptions) -> SessionOptions:
        """Return the session options for an artifact: the user's options, and options that the graphs require."""
        return for_float8(session, artifact)

    def disabled_optimizers(self, artifact: Artifact, component: Component) -> Sequence[str]:
        """Return the names of ONNX Runtime's graph optimizers that are slow or wrong with this provider."""
        return ()

    def rewritten_graph(self, artifact: Artifact, component: Component, session: SessionOptions) -> bytes | None:
        """Return a serialized graph to open instead of the component's graph, or `None` to open the file.

        This method is not called for decoders whose rows may have different lengths.

        Args:
            artifact: The artifact.
            component: The component that is opened.
            session: The session options for the artifact, from `session_options`.
        """
        return None

    def cpu_flags(self) -> Sequence[str]:
        """Return the CPU instruction sets that the quantization preset depends on (`avx512_vnni`, ...)."""
        return ()

    # The following methods implement the protocol `Backend`.

    def probe(self) -> Probe:
        """Return the provider's devices, or the reason why there are no devices. Never raises."""
        versions = {"onnxruntime": ort.__version__}
        try:
            devices, reason = self._available_devices()
        except BackendUnavailableError as error:
            devices, reason = (), Reason("library", error.message, error.fix or self.install)
        # Third-party libraries may raise anything: report every exception as a reason instead of crashing.
        except Exception as error:  # noqa: BLE001
            message = f"the search for devices of {self.provider} failed: {type(error).__name__}: {error}"
            devices, reason = (), Reason("probe-failed", message, self.install)
        return Probe(devices=devices, reasons=() if reason is None else (reason,), versions=versions)

    def exporter(self) -> Exporter | None:
        """Return the ONNX exporter, or `None` if the spec does not declare the stage."""
        if not self._does("export"):
            return None
        from .export.exporter import OnnxExporter

        return OnnxExporter(self.spec.name, self.optimizer, self.quantizer)

    def optimizer(self) -> Optimizer | None:
        """Return the optimizer with ONNX Runtime's fusions; `None` if the spec declares no optimization levels."""
        capability = self.spec.capability("optimize", "onnx")
        if capability is None:
            return None
        from .optimization.fusions import CPU
        from .optimization.optimizer import OrtOptimizer

        halves = tuple(dtype for dtype in capability.dtypes if dtype in _HALF)
        return OrtOptimizer(self.spec.name, replace(CPU, half_dtypes=halves))

    def quantizer(self) -> Quantizer | None:
        """Return the quantizer with ONNX Runtime's schemes; `None` if the spec declares no quantization schemes.

        The quantizer chooses its preset from `cpu_flags`.
        """
        if not self._does("quantize"):
            return None
        from .quantization.quantizer import OrtQuantizer

        return OrtQuantizer(self.spec.name, self.cpu_flags)

    def trace_layers(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, LayerTrace]:
        """Return the graphs with the values of their layers. They run on ONNX Runtime's CPU provider; see `TracingBackend`."""
        from .traced_layers import OnnxLayerTrace

        return {component.name: OnnxLayerTrace(artifact, component) for component in artifact.components}

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, OrtSession]:
        """Open a session for every component; see `accel.interfaces.protocols.Backend.open`.

        Raises:
            ConfigError: The spec does not list one of the options, or the kernels do not compute in the requested data
                type.
            SessionError: ONNX Runtime cannot open a graph.
            BackendUnavailableError: The provider did not load, or runs none of a graph's arithmetic operators.
        """
        self._check_options(request.options)
        computes = self._compute_dtype(artifact, request.session)
        devices = self._library_devices(request.device)
        options = self._session_options(artifact, request)
        large = self.provider == CPU and not request.few_calls and artifact.bytes >= _LARGE_BYTES
        with weights_in_huge_pages() if large else nullcontext():
            return {
                component.name: OrtSession(
                    open_runtime(
                        artifact.path / component.file,
                        component,
                        provider=self.provider,
                        provider_options=self.provider_options(artifact, component, request.device, request.options),
                        options=options,
                        disabled_optimizers=self.disabled_optimizers(artifact, component),
                        shapes=request.shapes,
                        devices=devices,
                        model=self._graph(artifact, component, request, options),
                    ),
                    component,
                    request.device,
                    computes,
                    request.shapes,
                )
                for component in artifact.components
            }

    def _session_options(self, artifact: Artifact, request: OpenRequest) -> SessionOptions:
        """Return the session options; for few calls, the weights of a large artifact stay in the memory-mapped file."""
        options = self.session_options(artifact, request.session)
        # Without prepacking, ONNX Runtime selects different integer kernels, so quantized graphs keep prepacking.
        if not request.few_calls or artifact.manifest.quantization is not None:
            return options
        return without_copies(options) if artifact.bytes >= _LARGE_BYTES else options

    def _graph(
        self, artifact: Artifact, component: Component, request: OpenRequest, options: SessionOptions
    ) -> bytes | None:
        """Return the serialized graph to open instead of the component's file, or `None` to open the file."""
        graph = self._with_lengths(artifact, component, request) or self.rewritten_graph(artifact, component, options)
        if not request.exact:
            return graph
        from .quantization.weight_only import without_rounded_activations

        return without_rounded_activations(artifact.path / component.file, graph) or graph

    def _with_lengths(self, artifact: Artifact, component: Component, request: OpenRequest) -> bytes | None:
        """Return the decoder graph in which rows of the batch may have different lengths.

        Return `None` if the kernels do not support different lengths or the graph cannot be rewritten.
        """
        if not (self.own_lengths and component.stateful) or request.shapes:
            return None
        from .optimization.maskless_decoder import lengths_form

        return lengths_form(artifact.path / component.file)

    def _available_devices(self) -> tuple[tuple[DeviceSpec, ...], Reason | None]:
        """Return the provider's devices and `None`; if there are no devices, return an empty tuple and the reason."""
        path = self._loaded_library()
        if path is None:
            if self.provider in ort.get_available_providers():
                return self.devices(), None
            return (), Reason("provider", f"this ONNX Runtime build has no {self.provider}", self.install)
        specs = device_specs(provider_devices(self.provider), self.device_types)
        # A library may also list the CPU, because it computes some operators on the CPU. Keep only the device types
        # that the spec declares.
        devices = tuple(spec for spec in specs if spec.type in self._run_types())
        if devices:
            return devices, None
        others = other_providers(self.provider)
        if others:
            return (), Reason(
                "provider-name",
                f"the library {path.name} registers {', '.join(others)}, but not {self.provider}",
                f"set the attribute `provider` of the plugin's backend class to {' or '.join(map(repr, others))}",
            )
        listed = ", ".join(map(str, specs)) or "none"
        types = " or ".join(self._run_types())
        return (), Reason(
            "no-device",
            f"the library {path.name} found no device of type {types} for {self.provider} (its devices: {listed})",
            "check that the device is present and that its driver is installed, then run `accel doctor`",
        )

    def _loaded_library(self) -> Path | None:
        """Register the provider's library with ONNX Runtime and return its path; `None` for a provider in the build.

        Raises:
            BackendUnavailableError: The library is missing or does not load.
        """
        try:
            path = self.library()
            if path is not None:
                register_library(self.provider, path)
        except BackendUnavailableError as error:
            raise BackendUnavailableError(error.message, fix=error.fix or self.install) from error
        # A plugin's `library` method can raise any exception; ImportError is the most frequent exception.
        except Exception as error:
            raise BackendUnavailableError(
                f"The library of {self.provider} was not found: {type(error).__name__}: {error}",
                fix=self.install
                if isinstance(error, ImportError | OSError)
                else "report this error to the author of the plugin.",
            ) from error
        return path

    def _library_devices(self, device: DeviceSpec) -> tuple[ort.OrtEpDevice, ...]:
        """Return ONNX Runtime's device objects for a provider in a library; an empty tuple for a provider in the build.

        Raises:
            BackendUnavailableError: The library does not load, or has no such device.
        """
        if self._loaded_library() is None:
            return ()
        devices = provider_devices(self.provider)
        specs = device_specs(devices, self.device_types)
        chosen = tuple(
            native
            for native, spec in zip(devices, specs, strict=True)
            if (spec.type, spec.index) == (device.type, device.index)
        )
        if not chosen:
            raise BackendUnavailableError(
                f"{self.provider} has no device {device}, only {', '.join(map(str, specs)) or 'none'}.",
                fix="run `accel doctor` to see the devices of this machine, and pass one of them as device=...",
            )
        return chosen

    def _check_options(self, options: Mapping[str, object]) -> None:
        capability = self.spec.capability("run")
        names = capability.options if capability is not None else ()
        if options and not names:
            raise ConfigError(
                f"{self.provider} accepts no provider options, but the call passes {sorted(options)}.",
                fix="leave the options out. Pass settings of ONNX Runtime as session_options=SessionOptions(native={...}).",
            )
        check_option_names(options, names, {}, self.provider)

    def _compute_dtype(self, artifact: Artifact, session: SessionOptions) -> str:
        """Return the data type in which the kernels compute a graph."""
        floats = self.kernel_dtype or artifact.dtype
        if session.compute_dtype not in (None, floats):
            kernels = f"ONNX Runtime's {self.provider.removesuffix('ExecutionProvider')} kernels"
            raise ConfigError(
                f"compute_dtype={session.compute_dtype!r} is not possible: {kernels} compute in {floats}, not in {session.compute_dtype}.",
                fix="leave compute_dtype out, or use another backend (`accel doctor` lists them).",
            )
        return "int8" if artifact.manifest.quantization and not is_float8(artifact) else floats

    def _does(self, stage: Any) -> bool:
        return any(
            capability.stage == stage and "onnx" in (capability.consumes, capability.produces)
            for capability in self.spec.capabilities
        )

    def _run_types(self) -> tuple[str, ...]:
        """Return the device types that the spec runs on."""
        return tuple(
            dict.fromkeys(
                kind
                for capability in self.spec.capabilities
                if capability.stage == "run"
                for kind in capability.devices
            )
        )
