"""Data classes that the core and its plugins exchange. Uses only the standard library."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from ..artifact.tensors import TensorSpec as TensorSpec

API_VERSION = (3, 0)
"""Version of the plugin interface (major, minor). A plugin must have the same major and at most this minor."""

WEIGHTS = "torch"
"""Format of artifacts that are PyTorch models: weights, config and tokenizer."""

GENERATES = "generates"
"""Used in place of a task name: all tasks whose models generate token by token and keep a state between calls."""


def among(task: str, words: Collection[str]) -> bool:
    """Return whether a list contains a task, by its name or as `GENERATES`."""
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
        arch: Architecture that decides which kernels can run: `sm_90`, or `avx512_vnni+amx_int8`.
        memory_bytes: Size of its memory in bytes, if known.
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
    """A value of an option or setting that searches measure in addition to the default.

    It may be faster, smaller or more accurate. It changes the outputs.

    Attributes:
        name: Name of a provider option (`Capability.trials`) or of a scheme's setting (`SchemeSettings.trials`). A provider
            option must be in the backend's `recorded_options`, so that the result later runs as it was measured.
        value: Value to measure.
        devices: For a provider option: device types on which searches measure it.
        tasks: Tasks for which searches measure it; `("*",)` for all, `(GENERATES,)` for generating tasks.
        same_speed: Whether it changes only accuracy. Then only `quantize` searches within an accuracy budget measure it.
    """

    name: str
    value: str | int | bool
    devices: tuple[str, ...] = ("cpu",)
    tasks: tuple[str, ...] = ("*",)
    same_speed: bool = False


@dataclass(frozen=True, slots=True)
class SchemeSettings:
    """Settings of a scheme.

    Attributes:
        scheme: Name of the scheme, from `Capability.schemes`.
        names: Fields of `QuantizeConfig`, or of the settings class of a preparation, that the scheme accepts.
        trials: Values of these settings that searches measure in addition to the defaults.
    """

    scheme: str
    names: tuple[str, ...]
    trials: tuple[OptionTrial, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One ability of a backend: to convert the format `consumes` to `produces` at a `stage`, or to run the format `consumes`.

    Attributes:
        stage: `prepare`, `export`, `optimize`, `quantize` or `run`.
        consumes: Artifact format that is read (`None` for `prepare` and `export`, which read a PyTorch model).
        produces: Artifact format that is written (`None` for `prepare`, which returns a PyTorch model, and for `run`).
        devices: Device types.
        dtypes: Artifact dtypes that the backend reads or writes.
        schemes: Optimization levels, preparations (`accelerate`, ...), or quantization schemes, ordered by expected speed,
            fastest first.
        settings: Settings of each scheme. The core rejects all other settings by name.
        options: For `export`: options that only this exporter has (`ExportConfig.options`). For `run`: the vendor's device or
            provider options, if the backend lets `ortkit` check their names.
        tasks: Tasks to which the capability is limited; `("*",)` for all, `(GENERATES,)` for generating tasks.
        excludes: Tasks that the capability does not support.
        domains: Operator domains that the backend supports in graphs of the format `consumes`; `("",)` for the standard domain
            only, `None` for all. The core rejects graphs with other domains before it opens anything.
        dynamic_shapes: Whether named axes may vary from call to call.
        device_io: Whether inputs and outputs may be in device memory.
        thread_safe: Whether several threads may call one session at the same time.
        preferred_multiple: For `run`: multiple to which varying lengths are best padded, because each new length is compiled,
            or because kernels are faster there. 1 means no padding.
        fixed_shapes: For `run`: whether kernels of a graph with fixed shapes are faster than those of a dynamic graph that is
            always called with one shape. Then `accel tune` tries buckets even if all calls have the same length.
        trials: For `run`: options that `accel tune` tries in addition to the defaults, one at a time.
        searched: For `export`: whether `accel tune` tries it. Use False if another candidate runs the same kernels.
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
        """Return the names of a scheme's settings."""
        return next((one.names for one in self.settings if one.scheme == scheme), ())

    def scheme_trials(self, scheme: str, task: str) -> tuple[OptionTrial, ...]:
        """Return the values of a scheme's settings that searches measure for a task."""
        trials = next((one.trials for one in self.settings if one.scheme == scheme), ())
        return tuple(trial for trial in trials if "*" in trial.tasks or among(task, trial.tasks))

    def does(self, task: str) -> bool:
        """Return whether the capability supports a task."""
        return not among(task, self.excludes) and ("*" in self.tasks or among(task, self.tasks))

    def foreign(self, domains: Iterable[str] | None) -> tuple[str, ...]:
        """Return the operator domains of a graph that the backend lacks. Empty if the domains of either are unknown."""
        if self.domains is None or domains is None:
            return ()
        return tuple(sorted(set(domains) - set(self.domains)))


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason why something cannot be used, and what the user can do."""

    code: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Devices of a backend on this machine. Probing never raises."""

    devices: tuple[DeviceSpec, ...] = ()
    reasons: tuple[Reason, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def available(self) -> bool:
        """Whether at least one device can be used."""
        return bool(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """Description of a plugin. The core reads it before it imports any other part of the plugin.

    Attributes:
        name: Name that users pass as `backend=`.
        summary: One line for `accel doctor`.
        extra: Extra of `accel-transformers` (or the distribution) that installs the requirements.
        impl: `package.module:Class` of the `Backend`, imported at the first probe.
        api: Version of the plugin interface that the plugin was written for.
        priority: Priority among backends that can be chosen automatically; the highest is chosen.
        auto: Whether the backend may be chosen automatically. Must be False if the backend changes numerics.
        requires: Import names of required packages.
        capabilities: Capabilities of the backend.
        aliases: Other names of the backend, such as ONNX Runtime's provider names.
        layouts: Patterns of files that its `folder_reader` reads, relative to the folder: `openvino_*.xml`, `onnx/*.onnx`.
        folder_reader: `package.module:Class` of the `FolderReader` for folders of other tools.
        distributions: Distributions whose versions affect the artifacts, for manifests and `accel doctor`.
        tested: Distributions with the oldest and the newest tested release line. Other installed versions cause one warning.
        conflicts: Pairs of distributions that cannot be installed together.
        native_options: The runtime's own class of session options, which users may pass instead of accel's: `library.Class`.
        recorded_options: Provider options that a manifest may set, because they name no file, load no library and allocate no
            memory. A manifest cannot set other options.
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
    distributions: tuple[str, ...] = ()
    tested: tuple[tuple[str, str, str], ...] = ()
    conflicts: tuple[tuple[str, str], ...] = ()
    native_options: str = ""
    recorded_options: tuple[str, ...] = ()

    def capability(
        self, stage: Stage, format: str | None = None, *, produces: str | None = None, task: str | None = None
    ) -> Capability | None:
        """Return the first capability for `stage` that reads `format` and writes `produces`. `None` matches any format.

        With a `task`, capabilities that are limited to certain tasks including this one are preferred.
        """
        fitting = [
            capability
            for capability in self.capabilities
            if capability.stage == stage
            and (format is None or capability.consumes == format)
            and (produces is None or capability.produces == produces)
        ]
        return next((one for one in fitting if task and among(task, one.tasks)), next(iter(fitting), None))
