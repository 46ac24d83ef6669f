"""Plain data that crosses the border between the core and its plugins. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from ..artifact.tensors import TensorSpec as TensorSpec

API_VERSION = (3, 0)
"""Version of the plugin interface (major, minor). A plugin must have the same major and at most this minor."""

WEIGHTS = "torch"
"""The format of artifacts that are PyTorch models: weights, config, tokenizer."""

GENERATES = "generates"
"""In place of a task's name: every task whose models answer token by token, over something that is kept between calls."""


def among(task: str, words: Collection[str]) -> bool:
    """Whether words name a task, by itself or by what it does (`GENERATES`)."""
    from .task_registry import task_spec

    return task in words or (GENERATES in words and task_spec(task).generates)


Stage = Literal["prepare", "export", "optimize", "quantize", "run"]

_DEVICE = re.compile(r"(?P<type>[a-z][a-z_]*)(?::(?P<index>\d+))?\Z")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device, in `torch.device` words.

    Attributes:
        type: `cpu`, `cuda`, ...
        index: Ordinal among the devices of that type.
        name: What the vendor calls it.
        arch: What a kernel can use: `sm_90`, or `avx512_vnni+amx_int8`.
        memory_bytes: Its memory, where known.
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
        """`"cuda:1"` as a spec.

        Raises:
            ConfigError: `text` is not a device string.
        """
        from ..errors import ConfigError

        match = _DEVICE.match(text.strip().lower())
        if match is None:
            raise ConfigError(f"{text!r} is not a device.", fix="use a torch device string such as 'cpu' or 'cuda:0'.")
        return cls(match["type"], int(match["index"] or 0))


@dataclass(frozen=True, slots=True)
class OptionTrial:
    """A value that a search measures in addition to the default: it may be faster, smaller or more accurate, and answers differ.

    Attributes:
        name: Of a provider option (`Capability.trials`), which must be among the backend's `recorded_options` so that the result
            runs as it was measured; or of a setting of a scheme (`SchemeSettings.trials`).
        value: What is tried.
        devices: Of an option: device types on which it is worth a try.
        tasks: Tasks for which it is worth a try; `("*",)` for any, `(GENERATES,)` for those that generate.
        same_speed: Whether it changes accuracy alone; then only searches inside an accuracy budget of `quantize` try it.
    """

    name: str
    value: str | int | bool
    devices: tuple[str, ...] = ("cpu",)
    tasks: tuple[str, ...] = ("*",)
    same_speed: bool = False


@dataclass(frozen=True, slots=True)
class SchemeSettings:
    """Which settings a scheme has a use for.

    Attributes:
        scheme: Of `Capability.schemes`.
        names: Fields of `QuantizeConfig`, or of the preparation's own settings.
        trials: Values of these settings that searches try in addition to the defaults.
    """

    scheme: str
    names: tuple[str, ...]
    trials: tuple[OptionTrial, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One thing a backend can do: turn `consumes` into `produces` at a `stage`, or run `consumes`.

    Attributes:
        stage: `prepare`, `export`, `optimize`, `quantize` or `run`.
        consumes: Artifact format read (`None` for `prepare` and `export`, which read a PyTorch model).
        produces: Artifact format written (`None` for `prepare`, which gives a PyTorch model, and for `run`).
        devices: Device types.
        dtypes: Artifact dtypes it accepts or makes.
        schemes: Optimization levels, preparations (`accelerate`, ...), or quantization schemes in the order of expected speed,
            fastest first.
        settings: What each scheme can be told; the core refuses everything else by name.
        options: Of `export`: options that only this exporter has (`ExportConfig.options`). Of `run`: the vendor's device or
            provider options, where the backend leaves checking their names to `ortkit`.
        tasks: Tasks it is limited to; `("*",)` for any, `(GENERATES,)` for those that generate.
        excludes: Tasks that it does not do.
        domains: Domains of the operators that it has, of those that a graph of `consumes` may use: `("",)` for the
            standard's alone, `None` for whatever comes. A graph with others is refused before anything is opened.
        dynamic_shapes: Whether named axes may vary from call to call.
        device_io: Whether inputs and outputs may live on the device.
        thread_safe: Whether one session may be called from several threads at once.
        preferred_multiple: Of `run`: where lengths vary from call to call, what they are best padded to multiples of, because
            each new length is compiled, or because kernels are faster there. 1: they are best left alone.
        fixed_shapes: Of `run`: whether kernels of a graph with fixed shapes are faster than those of the same graph called with one
            shape again and again. Then `accel tune` tries buckets even where all calls have one length.
        trials: Of `run`: options that `accel tune` tries in addition to the defaults, one at a time.
        searched: Of `export`: whether `accel tune` tries it. What packs the same kernels that another candidate runs need not be.
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
        """The settings that a scheme has a use for."""
        return next((one.names for one in self.settings if one.scheme == scheme), ())

    def scheme_trials(self, scheme: str, task: str) -> tuple[OptionTrial, ...]:
        """The values of a scheme's settings that are worth a try for a task."""
        trials = next((one.trials for one in self.settings if one.scheme == scheme), ())
        return tuple(trial for trial in trials if "*" in trial.tasks or among(task, trial.tasks))

    def does(self, task: str) -> bool:
        """Whether it is for a task."""
        return not among(task, self.excludes) and ("*" in self.tasks or among(task, self.tasks))

    def foreign(self, domains: Iterable[str] | None) -> tuple[str, ...]:
        """Of the operator domains of a graph, those that it does not have; none, where either side is unknown."""
        if self.domains is None or domains is None:
            return ()
        return tuple(sorted(set(domains) - set(self.domains)))


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something cannot be used, and what to do about it."""

    code: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a backend found on this machine. Probing never raises."""

    devices: tuple[DeviceSpec, ...] = ()
    reasons: tuple[Reason, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def available(self) -> bool:
        """Whether at least one device can be used."""
        return bool(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """What a plugin says about itself before anything of it is imported.

    Attributes:
        name: The word users pass as `backend=`.
        summary: One line for `accel doctor`.
        extra: The extra of `accel-transformers` (or the distribution) that installs what it needs.
        impl: `package.module:Class` of the `Backend`; imported at the first probe.
        api: Version of the plugin interface it was written for.
        priority: Among backends that could be chosen automatically, the highest wins.
        auto: Whether it may be chosen automatically; a backend that changes numerics must not be.
        requires: Import names that must be installed.
        capabilities: What it can do.
        aliases: Other words for it, such as ONNX Runtime's provider names.
        layouts: Patterns of files that its `folder_reader` reads, relative to the folder: `openvino_*.xml`, `onnx/*.onnx`.
        folder_reader: `package.module:Class` of the `FolderReader` for folders of other tools.
        distributions: Those whose versions decide what it makes, for manifests and `accel doctor`.
        tested: Distributions with the oldest and the newest release line that was tested; another installed version warns once.
        conflicts: Pairs of distributions that cannot be installed together.
        native_options: The runtime's own class of session options, which users may pass instead of ours: `library.Class`.
        recorded_options: Provider options that an artifact may bring in its manifest: they name no file, load no library and
            take no memory. Others a manifest cannot set.
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
        """The first capability for `stage` that reads `format` (any, when `None`) and writes `produces` (likewise).

        With a `task`, one that is limited to tasks with this one among them comes before the others.
        """
        fitting = [
            capability
            for capability in self.capabilities
            if capability.stage == stage
            and (format is None or capability.consumes == format)
            and (produces is None or capability.produces == produces)
        ]
        return next((one for one in fitting if task and among(task, one.tasks)), next(iter(fitting), None))
