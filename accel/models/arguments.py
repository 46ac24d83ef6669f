"""Arguments of `from_pretrained`, including their names in transformers, Optimum and ONNX Runtime."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..artifact.hub import HubOptions
from ..artifact.resolved_model import ResolvedModel
from ..backends import registry
from ..backends.plan import RunPreferences
from ..config import ExportConfig, SessionOptions, check_names
from ..errors import ConfigError, did_you_mean
from ..stages.resolution import resolve

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingArguments:
    """Arguments of `from_pretrained`, grouped for the stages and the backends.

    Attributes:
        task: The requested task.
        hub: Options of the Hub download, such as revision and token.
        settings: Backend, device and session options.
        export_config: Export settings.
        file_name, variant, export: Same as in `from_pretrained`.
        config, use_cache: Same as in `from_pretrained`.
    """

    task: str | None
    hub: HubOptions
    settings: RunPreferences
    export_config: ExportConfig
    file_name: str | None
    variant: str | None
    export: bool | None
    config: Any
    use_cache: bool | None

    def resolve(self, model: Any, *, default_task: str | None = None) -> ResolvedModel:
        """Resolve a model with these arguments; see `resolution.resolve`."""
        return resolve(
            model, task=self.task, default_task=default_task, hub=self.hub, file_name=self.file_name, variant=self.variant,
            export=self.export,
        )  # fmt: skip


def read_arguments(
    *,
    export: bool | None = None,
    backend: str | None = None,
    device: str | int | torch.device | None = None,
    provider: str | None = None,
    providers: Sequence[str] | None = None,
    provider_options: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
    session_options: Any = None,
    task: str | None = None,
    config: Any = None,
    file_name: str | None = None,
    variant: str | None = None,
    use_cache: bool | None = None,
    **others: Any,
) -> LoadingArguments:
    """Read the arguments of `from_pretrained`; `others` contains Hub options and export settings.

    Raises:
        ConfigError: An argument is unknown, or two arguments contradict each other.
        UnknownBackendError: The backend does not exist.
    """
    hub = HubOptions(**{option.name: others.pop(option.name) for option in fields(HubOptions) if option.name in others})
    settings, device = without_other_arguments(others, device)
    return LoadingArguments(
        task=task,
        hub=hub,
        settings=RunPreferences(
            backend=backend_name(backend, provider, providers),
            device=device_name(device),
            provider_options=provider_options_of(provider_options),
            options=session_options_of(session_options),
        ),
        export_config=export_config_of(settings),
        file_name=file_name,
        variant=variant,
        export=export,
        config=config,
        use_cache=use_cache,
    )


def backend_name(backend: str | None, provider: str | None, providers: Sequence[Any] | None = None) -> str | None:
    """Return the backend named by `backend=`, `provider=` or `providers=`; unknown names raise here, before any work.

    Args:
        backend: Name of a backend.
        provider: ONNX Runtime's name of an execution provider.
        providers: ONNX Runtime's names. The first one is used; operators that it does not support run on another provider.

    Raises:
        ConfigError: The arguments name different backends.
        UnknownBackendError: No plugin has that name.
    """
    if providers:
        first = providers[0]
        if provider is not None and provider != first:
            raise ConfigError(f"provider={provider!r} and providers={list(providers)} differ.", fix="pass one of them.")
        provider = first
    names = {registry.describe(name).name for name in (backend, provider) if name is not None}
    if len(names) > 1:
        raise ConfigError(f"backend={backend!r} and provider={provider!r} name two backends.", fix="pass one of them.")
    return names.pop() if names else None


EXPORT_SETTINGS = tuple(field.name for field in fields(ExportConfig))
ARGUMENTS = (
    *(name for name, one in inspect.signature(read_arguments).parameters.items() if one.kind is one.KEYWORD_ONLY),
    *(option.name for option in fields(HubOptions)),
)
"""Names of the arguments of `from_pretrained`, without export settings."""


def provider_options_of(
    options: Mapping[str, object] | Sequence[Mapping[str, object]] | None,
) -> Mapping[str, object] | None:
    """Return the options of the single provider. A list with one mapping, as in ONNX Runtime, is accepted.

    Raises:
        ConfigError: The list has another length, or the value is not a mapping.
    """
    if options is None or isinstance(options, Mapping):
        return options
    entries = list(options) if isinstance(options, Sequence) and not isinstance(options, str) else []
    if len(entries) != 1 or not isinstance(entries[0], Mapping):
        raise ConfigError(
            f"provider_options holds {len(entries)} entries for one provider.", fix="pass one dictionary of options."
        )
    return entries[0]


def session_options_of(options: Any) -> SessionOptions | None:
    """Return `SessionOptions` unchanged, convert a mapping, and wrap a runtime's own options object if a backend declares its class.

    Raises:
        ConfigError: `options` is neither a `SessionOptions`, a mapping, nor a session options class of a known runtime.
    """
    if options is None or isinstance(options, SessionOptions):
        return options
    if isinstance(options, Mapping):
        return SessionOptions.from_dict(options)
    word = f"{type(options).__module__.partition('.')[0]}.{type(options).__name__}"
    known = sorted({spec.native_options for spec in registry.describe_all()[0] if spec.native_options})
    if word not in known:
        raise ConfigError(
            f"session_options is a {type(options).__name__}.",
            fix=f"pass {' or '.join(['accel.SessionOptions', *known])}.",
        )
    return SessionOptions(native={word: options})


# Arguments of Optimum's `from_pretrained` that have no effect here.
_WITHOUT_EFFECT = ("use_io_binding", "use_merged", "library_name", "low_cpu_mem_usage")
_QUANTIZED_ON_LOADING = ("load_in_8bit", "load_in_4bit", "quantization_config")
OTHER_ARGUMENTS = (
    *_WITHOUT_EFFECT, *_QUANTIZED_ON_LOADING, "force_download", "device_map", "dtype", "torch_dtype", "attn_implementation",
)  # fmt: skip
"""Arguments of transformers' and Optimum's `from_pretrained` that have no parameter here: accepted, or rejected with a reason."""
_ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def without_other_arguments(
    settings: Mapping[str, Any], device: str | int | torch.device | None
) -> tuple[dict[str, Any], str | int | torch.device | None]:
    """Convert arguments of transformers' and Optimum's `from_pretrained`; return the remaining settings and the device.

    `device_map` names a device or leaves the choice to accel. `dtype="auto"` and `attn_implementation` do not change a graph.
    Arguments without effect are removed and logged at debug level.

    Raises:
        ConfigError: The arguments ask for several devices, an unknown attention implementation, a forced download, or
            quantization during loading.
    """
    left = dict(settings)
    for name in _WITHOUT_EFFECT:
        if name in left:
            value = left.pop(name)
            logger.debug("%s=%r changes nothing here.", name, value)
    if left.pop("force_download", False):
        raise ConfigError(
            "force_download=True: what the Hub's cache holds is verified, not fetched again.",
            fix="remove the model from the cache (`hf cache delete`), or name a revision.",
        )
    for name in _QUANTIZED_ON_LOADING:
        if left.pop(name, None):
            raise ConfigError(
                f"{name}=...: a graph is quantized before it is loaded.",
                fix="make a quantized artifact first (`accel quantize MODEL OUT`), and load that.",
            )
    placed = left.pop("device_map", None)
    if isinstance(placed, Mapping):
        if len(set(map(str, placed.values()))) != 1:
            raise ConfigError(
                f"device_map is {dict(placed)}: a graph runs on one device.", fix="pass device=..., as in 'cuda:0'."
            )
        placed = next(iter(placed.values()))
    if placed is not None and device is None and placed not in ("auto", "balanced", "balanced_low_0", "sequential"):
        device = placed
    for name in ("dtype", "torch_dtype"):
        if left.get(name) == "auto":
            del left[name]
    attention = left.pop("attn_implementation", None)
    if attention not in (None, *_ATTENTIONS):
        raise ConfigError(
            f"attn_implementation is {attention!r}.{did_you_mean(str(attention), _ATTENTIONS)}",
            fix="leave it out: the graph has an attention of its own.",
        )
    return left, device


def export_config_of(settings: Mapping[str, Any]) -> ExportConfig:
    """Return the export settings among the arguments of `from_pretrained`; `dtype` may be named as in transformers.

    Raises:
        ConfigError: An argument is neither an argument of `from_pretrained` nor an export setting.
    """
    values = dict(settings)
    if "torch_dtype" in values:
        values.setdefault("dtype", values.pop("torch_dtype"))
    if isinstance(values.get("dtype"), torch.dtype):
        values["dtype"] = str(values["dtype"]).removeprefix("torch.")
    if unknown := [name for name in values if name not in EXPORT_SETTINGS]:
        check_names("from_pretrained", "argument", unknown, (*ARGUMENTS, *EXPORT_SETTINGS))
    return ExportConfig.from_dict(values)


def device_name(device: str | int | torch.device | None) -> str | None:
    """Return the name of a device. Integers are GPU indices as in transformers' pipelines; -1 is the CPU."""
    if isinstance(device, int):
        return "cpu" if device < 0 else f"cuda:{device}"
    return None if device is None else str(device)
