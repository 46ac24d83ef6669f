"""Data classes that describe backends to accel. This module imports no package outside the standard library."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from ..artifact.tensor_specs import TensorSpec as TensorSpec

API_VERSION = (3, 0)
"""Version of the plugin interface (major, minor).

A plugin must be written for the same major version, and for this minor version or an earlier one.
"""

WEIGHTS = "torch"
"""Format of artifacts that are PyTorch models: weights, config and tokenizer."""

GENERATES = "generates"
"""Value that can be used instead of a task name. It stands for all tasks whose models generate token by token with a KV cache."""


def among(task: str, words: Collection[str]) -> bool:
    """Return whether a list contains the name of a task, or contains `GENERATES` and the task generates tokens."""
    from .task_registry import task_spec

    return task in words or (GENERATES in words and task_spec(task).generates)


Stage = Literal["prepare", "export", "optimize", "quantize", "run"]

_DEVICE = re.compile(r"(?P<type>[a-z][a-z_]*)(?::(?P<index>\d+))?\Z")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device, with the names of `torch.device`.

    Attributes:
        type: `cpu`, `cuda`, ...
        index: Index among the devices of that type.
        name: The vendor's name of the device.
        arch: Hardware architecture, such as `sm_90` or `avx512_vnni+amx_int8`. It decides which kernels can run.
        memory_bytes: Size of the device's memory in bytes, or `None` if the size is unknown.
    """

    type: str
    index: int = 0
    _: KW_ONLY
    name: str = ""
    arch: str = ""
    memory_bytes: int | None = None

    def __str__(self) -> str:
        return self.type if self.type == "cpu" and self.index == 0 else f"{self.type}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> DeviceSpec:
        """Parse a device string such as `"cuda:1"`.

        Raises:
            ConfigError: `text` is not a device string.
        """
        from ..errors import ConfigError

        match = _DEVICE.match(text.strip().lower())
        if match is None:
            raise ConfigError(
                f"{text!r} is not the name of a device.", fix="use a torch device name, such as 'cpu' or 'cuda:0'."
            )
        return cls(match["type"], int(match["index"] or 0))


@dataclass(frozen=True, slots=True)
class OptionTrial:
    """A value of an option that `accel tune` and the search for a quantization measure in addition to the default.

    The value changes the outputs of the model, and it may make the model faster, smaller or more accurate.

    Attributes:
        name: Name of a provider option (`Capability.trials`) or of a scheme's setting (`SchemeSettings.trials`). A provider
            option must also be in the backend's `recorded_options`, so that the manifest can store the option.
        value: Value to measure.
        devices: For a provider option: types of the devices on which the value is measured.
        tasks: Tasks for which the value is measured. `("*",)` means all tasks, `(GENERATES,)` means generating tasks.
        same_speed: Whether the value changes only the accuracy and not the speed. Then only the search for a quantization within an
            accuracy budget measures the value.
    """

    name: str
    value: str | int | bool
    devices: tuple[str, ...] = ("cpu",)
    tasks: tuple[str, ...] = ("*",)
    same_speed: bool = False

    def fits(self, task: str) -> bool:
        """Return whether the value is measured for a task."""
        return "*" in self.tasks or among(task, self.tasks)


@dataclass(frozen=True, slots=True)
class SchemeSettings:
    """Settings that a quantization scheme or a preparation scheme accepts.

    Attributes:
        scheme: Name of the scheme, from `Capability.schemes`.
        names: Names of the accepted fields of `QuantizeConfig`, or of the settings class of the preparation.
        trials: Values of these fields that a search measures in addition to the defaults.
    """

    scheme: str
    names: tuple[str, ...]
    trials: tuple[OptionTrial, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One ability of a backend: to run artifacts of a format, or to convert artifacts from one format to another format.

    Attributes:
        stage: `prepare`, `export`, `optimize`, `quantize` or `run`.
        consumes: Artifact format that the backend reads. `None` for `prepare` and `export`, which read a PyTorch model. `onnx` for an
            `export` that is compiled from ONNX graphs (`CompilingExporter`).
        produces: Artifact format that the backend writes. `None` for `run`, and for `prepare`, which returns a PyTorch model.
        devices: Types of the supported devices.
        dtypes: Artifact dtypes that the backend reads or writes.
        schemes: Optimization levels, preparations (`accelerate`, ...) or quantization schemes. The scheme that is expected to be the
            fastest comes first. For `export`: quantization schemes that the exporter applies in one pass (`QuantizingExporter`).
        settings: Settings of each scheme. accel raises an error for all other settings.
        options: For `export`: options that only this exporter has (`ExportConfig.options`). For `run`: the vendor's device or
            provider options, if the backend lets `ortkit` check their names.
        tasks: Supported tasks. `("*",)` means all tasks, `(GENERATES,)` means generating tasks.
        excludes: Tasks that are not supported although they are in `tasks`.
        domains: ONNX operator domains that the backend supports in graphs of the format `consumes`. `("",)` means only the standard
            domain, `None` means all domains. accel raises an error for graphs with other domains before it opens the graph.
        dynamic_shapes: Whether the sizes of named axes may differ from call to call.
        device_io: Whether inputs and outputs may be in device memory.
        thread_safe: Whether several threads may call one session at the same time.
        preferred_multiple: For `run`: multiple to which text lengths should be padded, because the runtime compiles each new length,
            or because kernels are faster for such lengths. 1 means no padding.
        fixed_shapes: For `run`: whether a graph with fixed shapes is faster than a dynamic graph that is always called with the same
            shape. Then `accel tune` measures buckets even if all calls have the same length.
        trials: For `run`: options that `accel tune` measures in addition to the defaults, one option at a time.
        searched: For `export`: whether `accel tune` measures the exported format. Use False if another candidate runs the same
            kernels.
    """

    stage: Stage
    consumes: str | None = None
    produces: str | None = None
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32",)
    schemes: tuple[str, ...] = ()
    settings: tuple[SchemeSettings, ...] = ()
    options: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("*",)
    excludes: tuple[str, ...] = ()
    domains: tuple[str, ...] | None = None
    dynamic_shapes: bool = True
    device_io: bool = False
    thread_safe: bool = False
    preferred_multiple: int = 1
    fixed_shapes: bool = False
    trials: tuple[OptionTrial, ...] = ()
    searched: bool = True

    def takes(self, scheme: str) -> tuple[str, ...]:
        """Return the names of the settings that a scheme accepts."""
        return next((entry.names for entry in self.settings if entry.scheme == scheme), ())

    def scheme_trials(self, scheme: str, task: str) -> tuple[OptionTrial, ...]:
        """Return the values of a scheme's settings that a search measures for a task."""
        trials = next((entry.trials for entry in self.settings if entry.scheme == scheme), ())
        return tuple(trial for trial in trials if trial.fits(task))

    def run_trials(self, task: str, device: str) -> tuple[OptionTrial, ...]:
        """Return the values of provider options that a search measures for a task on a type of device."""
        return tuple(trial for trial in self.trials if device in trial.devices and trial.fits(task))

    def does(self, task: str) -> bool:
        """Return whether the capability supports a task."""
        return not among(task, self.excludes) and ("*" in self.tasks or among(task, self.tasks))

    def foreign(self, domains: Iterable[str] | None) -> tuple[str, ...]:
        """Return the operator domains of a graph that the backend does not support.

        The result is empty if the domains of the graph (`None`) or of the backend are unknown.
        """
        if self.domains is None or domains is None:
            return ()
        return tuple(sorted(set(domains) - set(self.domains)))


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason why a backend or a device cannot be used, and a command or setting that solves the problem."""

    code: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Result of `Backend.probe`: the devices that the backend can use on this machine, and reasons for unusable devices."""

    devices: tuple[DeviceSpec, ...] = ()
    reasons: tuple[Reason, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def available(self) -> bool:
        """Whether at least one device can be used."""
        return bool(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """Description of a backend plugin. accel reads the description before it imports any other module of the plugin.

    Attributes:
        name: Name that users pass as `backend=`.
        summary: Description of the backend in one line, for `accel doctor`.
        extra: Extra of `accel-transformers`, or name of a package, that installs the required packages.
        impl: `package.module:Class` of the `Backend`. accel imports it when it probes the backend for the first time.
        api: Version of the plugin interface for which the plugin was written.
        priority: Among the backends that can be chosen automatically, accel chooses the backend with the highest priority.
        auto: Whether accel may choose the backend automatically. It must be False if the backend computes with a lower precision than
            the artifact's dtype.
        requires: Import names of required packages.
        capabilities: Capabilities of the backend.
        aliases: Other names of the backend, such as ONNX Runtime's provider names.
        layouts: Patterns of the files that the `folder_reader` reads, relative to the model's folder: `openvino_*.xml`, `onnx/*.onnx`.
        folder_reader: `package.module:Class` of the `FolderReader` for folders of other tools.
        written_layouts: Folder layouts of other libraries (`accel convert --layout NAME`): the name of each layout, and
            `package.module:Class` of its `FolderWriter`.
        distributions: Installable packages whose versions affect the artifacts. Manifests and `accel doctor` list their versions.
        tested: Installable packages with the oldest and the newest tested version. accel warns once if another version is installed.
        conflicts: Pairs of packages that cannot be installed together.
        native_options: `library.Class` of the runtime's session options. Users may pass an object of this class instead of accel's
            `SessionOptions`.
        recorded_options: Provider options that a manifest may set. They must be safe for manifests from unknown authors: such an option
            must not contain a file name, load a library or allocate memory.
    """

    name: str
    summary: str
    extra: str
    impl: str
    api: tuple[int, int] = API_VERSION
    priority: int = 0
    auto: bool = False
    requires: tuple[str, ...] = ()
    capabilities: tuple[Capability, ...] = ()
    aliases: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    folder_reader: str = ""
    written_layouts: tuple[tuple[str, str], ...] = ()
    distributions: tuple[str, ...] = ()
    tested: tuple[tuple[str, str, str], ...] = ()
    conflicts: tuple[tuple[str, str], ...] = ()
    native_options: str = ""
    recorded_options: tuple[str, ...] = ()

    def capability(
        self, stage: Stage, format: str | None = None, *, produces: str | None = None, task: str | None = None
    ) -> Capability | None:
        """Return the first capability for `stage` that reads `format` and writes `produces`. `None` matches any format.

        If `task` is given, a capability that lists this task in `tasks` is preferred.
        """
        fitting = [
            capability
            for capability in self.capabilities
            if capability.stage == stage
            and (format is None or capability.consumes == format)
            and (produces is None or capability.produces == produces)
        ]
        return next(
            (fitting_capability for fitting_capability in fitting if task and among(task, fitting_capability.tasks)),
            next(iter(fitting), None),
        )
