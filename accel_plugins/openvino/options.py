"""Options of the OpenVINO backend: validation and translation into OpenVINO properties."""

# This module has no `from __future__ import annotations`, because the option check reads the field types at run time.
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import openvino as ov

from accel.config import JsonConfig, SessionOptions, available_processors, check_number
from accel.errors import ConfigError, did_you_mean

from .runtime import core

PRECISIONS: Mapping[str, ov.Type] = {"float32": ov.Type.f32, "float16": ov.Type.f16, "bfloat16": ov.Type.bf16}
# Properties of the core or of a compile call; no device lists them in its supported properties.
_CORE_PROPERTIES = ("CACHE_DIR", "CACHE_MODE", "ENABLE_MMAP", "FORCE_TBB_TERMINATE", "MULTI_DEVICE_PRIORITIES")
_SETTABLE = ("RW", "WO")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVinoOptions(JsonConfig):
    """Options of the backend by the names that `accel` uses; `None` means OpenVINO's default.

    Attributes:
        performance_hint: The goal for which OpenVINO chooses its threads and streams.
        streams: Number of calls that run in parallel, or `auto`.
        pinning: Whether threads are pinned to CPU cores.
        cache_dir: Folder for compiled models.
        dynamic_quantization_group_size: Number of activations that share a scale when the inputs of compressed weights
            are quantized at run time; 0 keeps them in floating point.
        kv_cache_precision: OpenVINO's name of the data type of the KV cache.
        runtime_cache_capacity: Maximum number of kernels in the CPU plugin's cache.
    """

    performance_hint: Literal["latency", "throughput", "cumulative_throughput"] | None = None
    streams: int | str | None = None
    pinning: bool | None = None
    cache_dir: str | Path | None = None
    dynamic_quantization_group_size: int | None = None
    kv_cache_precision: Literal["u8", "bf16", "f16", "f32"] | None = None
    runtime_cache_capacity: int | None = None

    def __post_init__(self) -> None:
        super(OpenVinoOptions, self).__post_init__()
        if self.streams != "auto":
            check_number("streams", self.streams, 1)  # type: ignore[arg-type]  # it refuses text
        for name in ("dynamic_quantization_group_size", "runtime_cache_capacity"):
            check_number(name, getattr(self, name), 0)

    def properties(self) -> dict[str, Any]:
        """Return the OpenVINO properties for the options that are not `None`.

        Raises:
            ConfigError: `cache_dir` cannot be read or is a file.
        """
        values = {
            "PERFORMANCE_HINT": self.performance_hint and self.performance_hint.upper(),
            "NUM_STREAMS": "AUTO" if self.streams == "auto" else self.streams,
            "ENABLE_CPU_PINNING": self.pinning,
            "CACHE_DIR": self.cache_dir and _folder(self.cache_dir),
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": self.dynamic_quantization_group_size,
            "KV_CACHE_PRECISION": self.kv_cache_precision,
            "CPU_RUNTIME_CACHE_CAPACITY": self.runtime_cache_capacity,
        }
        return {name: value for name, value in values.items() if value is not None}


_OURS = tuple(field.name for field in fields(OpenVinoOptions))


def _folder(value: str | Path) -> str:
    path = Path(value).expanduser().absolute()
    try:
        is_file = path.exists() and not path.is_dir()
    except OSError as error:
        raise ConfigError(
            f"The cache_dir {path} cannot be read: {error}.", fix="choose another folder for cache_dir."
        ) from error
    if is_file:
        raise ConfigError(
            f"cache_dir must be a folder, but {path} is a file.", fix="choose another folder for cache_dir."
        )
    return str(path)


def properties(device: str, options: Mapping[str, object], session: SessionOptions, dtype: str) -> dict[str, Any]:
    """Return the OpenVINO properties for a compile call.

    Args:
        device: OpenVINO's name of the device.
        options: Options of `accel` by name, or OpenVINO properties by their names in capitals.
        session: Session settings; `native` may contain OpenVINO properties as well.
        dtype: Data type used for computation.

    Raises:
        ConfigError: An option is unknown to `accel` and to OpenVINO, or a value is invalid.
    """
    settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": PRECISIONS[dtype]}
    if device != "CPU" and session.threads is not None:
        raise ConfigError(
            f"threads is {session.threads}, but the device {device} does not use CPU threads.",
            fix="leave threads out, or use the device 'cpu'.",
        )
    # The device `AUTO` may choose the CPU, so the settings for the CPU are also passed to `AUTO`.
    processor = _on_the_processor(session, dtype) if device == "CPU" or device.startswith("AUTO") else {}
    if session.inter_op_threads != 1:
        raise ConfigError(
            f"inter_op_threads is {session.inter_op_threads}, but OpenVINO has no inter-operator threads.",
            fix="leave inter_op_threads out, and use the option streams=... to run several calls in parallel.",
        )
    if session.graph_optimization != "all":
        raise ConfigError(
            f"graph_optimization is {session.graph_optimization!r}, but OpenVINO has no graph optimization levels.",
            fix="leave graph_optimization out.",
        )
    if session.profile is not None:
        settings["PERF_COUNT"] = True
    combined = {**options, **session.native}
    if isinstance(hint := combined.get("performance_hint"), str):
        combined["performance_hint"] = hint.lower()
    ours = OpenVinoOptions.from_dict({name: value for name, value in combined.items() if name in _OURS}).properties()
    native = {name: value for name, value in combined.items() if name not in _OURS}
    for name in native:
        if name not in processor:
            _check_native(device, name)
    for name, value in {**ours, **native}.items():
        (processor if name in processor else settings)[name] = value
    if processor and device != "CPU":
        return {**settings, "DEVICE_PROPERTIES": {"CPU": processor}}
    return settings | processor


def _on_the_processor(session: SessionOptions, dtype: str) -> dict[str, Any]:
    return {
        "INFERENCE_NUM_THREADS": session.threads or available_processors(),
        "ENABLE_CPU_PINNING": False,
        # By default, OpenVINO quantizes the inputs of compressed weights to 8 bits.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        # Without this property, OpenVINO stores the KV cache in 16 or 8 bits if the graph file requests it.
        "KV_CACHE_PRECISION": PRECISIONS[dtype],
        # OpenVINO's cache of kernels has an entry for each input shape of each layer. The default of 5,000 entries
        # needs gigabytes of memory if sequence lengths vary.
        "CPU_RUNTIME_CACHE_CAPACITY": 1500,
    }


def _check_native(device: str, name: str) -> None:
    """Raise if a name is not an OpenVINO property that can be set.

    Raises:
        ConfigError: The property is unknown or read-only; the message suggests a similar name.
    """
    listed = core().get_property(device, "SUPPORTED_PROPERTIES")
    settable = [word for word, mode in listed.items() if mode in _SETTABLE] + list(_CORE_PROPERTIES)
    if name not in settable:
        raise ConfigError(
            f"OpenVINO has no option {name!r} for the device {device}."
            f"{did_you_mean(name, settable if name.isupper() else _OURS)}",
            fix=f"use one of {', '.join(_OURS)}, or the name of an OpenVINO property in capital letters.",
        )
