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
from ..config import ExportConfig, QuantizeConfig, SessionOptions, check_names
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
        quantization: Quantization of the export.
        file_name, variant, export: Same as in `from_pretrained`.
        config, use_cache: Same as in `from_pretrained`.
    """

    task: str | None
    hub: HubOptions
    settings: RunPreferences
    export_config: ExportConfig
    quantization: str | QuantizeConfig | None
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
    quantization: str | QuantizeConfig | None = None,
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
        quantization=quantization,
        file_name=file_name,
        variant=variant,
        export=export,
        config=config,
        use_cache=use_cache,
    )


def backend_name(backend: str | None, provider: str | None, providers: Sequence[Any] | None = None) -> str | None:
    """Return the name of the backend that `backend`, `provider` or `providers` selects, or `None` if all of them are `None`.

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
            raise ConfigError(
                f"provider is {provider!r}, but the first entry of providers is {first!r}.",
                fix="pass provider or providers, not both.",
            )
        provider = first
    names = {registry.describe(name).name for name in (backend, provider) if name is not None}
    if len(names) > 1:
        raise ConfigError(
            f"backend={backend!r} and provider={provider!r} belong to two different backends: {', '.join(sorted(names))}.",
            fix="pass backend or provider, not both.",
        )
    return names.pop() if names else None


EXPORT_SETTINGS = tuple(field.name for field in fields(ExportConfig))
ARGUMENTS = (
    *(
        name
        for name, parameter in inspect.signature(read_arguments).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ),
    *(option.name for option in fields(HubOptions)),
)
"""Names of the arguments of `from_pretrained`, without export settings."""


def provider_options_of(
    options: Mapping[str, object] | Sequence[Mapping[str, object]] | None,
) -> Mapping[str, object] | None:
    """Return the options of the execution provider. A list that contains one mapping, as in ONNX Runtime, is also accepted.

    Raises:
        ConfigError: `options` is neither a mapping nor a list with exactly one mapping.
    """
    if options is None or isinstance(options, Mapping):
        return options
    entries = list(options) if isinstance(options, Sequence) and not isinstance(options, str) else []
    if len(entries) != 1 or not isinstance(entries[0], Mapping):
        raise ConfigError(
            f"provider_options is {options!r:.200}; a model runs on one execution provider, which needs one dictionary of options.",
            fix="pass one dictionary, such as provider_options={'device_id': 0}.",
        )
    return entries[0]


def session_options_of(options: Any) -> SessionOptions | None:
    """Return the session options as `SessionOptions`.

    A mapping is converted. An options object of a runtime, such as `onnxruntime.SessionOptions`, is wrapped if a backend supports its
    class.

    Raises:
        ConfigError: `options` is not a `SessionOptions`, a mapping, or an options object that a backend supports.
    """
    if options is None or isinstance(options, SessionOptions):
        return options
    if isinstance(options, Mapping):
        return SessionOptions.from_dict(options)
    class_name = f"{type(options).__module__.partition('.')[0]}.{type(options).__name__}"
    supported = sorted({spec.native_options for spec in registry.describe_all()[0] if spec.native_options})
    if class_name not in supported:
        raise ConfigError(
            f"session_options is an object of type {type(options).__name__}, which no installed backend supports.",
            fix=f"pass an object of type {' or '.join(['accel.SessionOptions', *supported])}.",
        )
    return SessionOptions(native={class_name: options})


# Arguments of Optimum's `from_pretrained` that have no effect in accel.
_WITHOUT_EFFECT = ("use_io_binding", "use_merged", "library_name", "low_cpu_mem_usage")
_QUANTIZED_ON_LOADING = ("load_in_8bit", "load_in_4bit", "quantization_config")
OTHER_ARGUMENTS = (
    *_WITHOUT_EFFECT, *_QUANTIZED_ON_LOADING, "force_download", "device_map", "dtype", "torch_dtype", "attn_implementation",
)  # fmt: skip
"""Arguments of `from_pretrained` in transformers and Optimum that have no parameter in accel's `from_pretrained`.

`without_other_arguments` accepts them or rejects them with a reason.
"""
_ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def without_other_arguments(
    settings: Mapping[str, Any], device: str | int | torch.device | None
) -> tuple[dict[str, Any], str | int | torch.device | None]:
    """Remove arguments that only transformers and Optimum have; return the remaining settings and the device.

    The device in `device_map` is used if `device` is `None`. `dtype="auto"` and `attn_implementation` are removed, because they
    do not change a graph. Arguments of Optimum that have no effect in accel are removed and logged at debug level.

    Raises:
        ConfigError: The arguments request several devices, an unknown attention implementation, a forced download, or
            quantization during loading.
    """
    left = dict(settings)
    for name in _WITHOUT_EFFECT:
        if name in left:
            value = left.pop(name)
            logger.debug("The argument %s=%r of from_pretrained has no effect in accel and is ignored.", name, value)
    if left.pop("force_download", False):
        raise ConfigError(
            "force_download=True is not supported: accel verifies the files in the Hugging Face cache and does not download them again.",
            fix="remove the model from the cache with `hf cache rm model/ID`, or pass revision=... to download another revision.",
        )
    for name in _QUANTIZED_ON_LOADING:
        if left.pop(name, None):
            raise ConfigError(
                f"{name} is not supported: it describes a quantization of PyTorch models.",
                fix="pass quantization='weight-int4' or another scheme without calibration data. Or quantize the model with "
                "`accel quantize MODEL OUT`, and load the folder OUT.",
            )
    device_map = left.pop("device_map", None)
    if isinstance(device_map, Mapping):
        if len(set(map(str, device_map.values()))) != 1:
            raise ConfigError(
                f"device_map is {dict(device_map)}, but a graph runs on one device and cannot be split.",
                fix="leave device_map out and pass one device, such as device='cuda:0'.",
            )
        device_map = next(iter(device_map.values()))
    automatic = ("auto", "balanced", "balanced_low_0", "sequential")
    if device_map is not None and device is None and device_map not in automatic:
        device = device_map
    for name in ("dtype", "torch_dtype"):
        if left.get(name) == "auto":
            del left[name]
    attention = left.pop("attn_implementation", None)
    if attention not in (None, *_ATTENTIONS):
        raise ConfigError(
            f"attn_implementation is {attention!r}, which transformers does not have."
            f"{did_you_mean(str(attention), _ATTENTIONS)}",
            fix="leave attn_implementation out; a graph's attention implementation is fixed when the model is exported.",
        )
    return left, device


def export_config_of(settings: Mapping[str, Any]) -> ExportConfig:
    """Return the `ExportConfig` with these settings; `dtype` may also be named `torch_dtype`, as in transformers.

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
