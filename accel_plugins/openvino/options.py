"""Options of the OpenVINO backend, checked and translated into OpenVINO's properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import openvino as ov

from accel.config import SessionOptions, available_processors
from accel.errors import ConfigError, did_you_mean

from .runtime import core

PRECISIONS: Mapping[str, ov.Type] = {"float32": ov.Type.f32, "float16": ov.Type.f16, "bfloat16": ov.Type.bf16}
_HINTS = ("latency", "throughput", "cumulative_throughput")
# Properties that belong to the core or to a compile call, which no device lists as its own.
_CORE_PROPERTIES = ("CACHE_DIR", "CACHE_MODE", "ENABLE_MMAP", "FORCE_TBB_TERMINATE", "MULTI_DEVICE_PRIORITIES")
_SETTABLE = ("RW", "WO")


def _hint(value: object) -> str:
    if str(value).lower() not in _HINTS:
        raise ConfigError(
            f"performance_hint is {value!r}.{did_you_mean(str(value), _HINTS)}", fix=f"use one of {', '.join(_HINTS)}."
        )
    return str(value).upper()


def _streams(value: object) -> int | str:
    if value == "auto":
        return "AUTO"
    return _count("streams", value)


def _count(name: str, value: object, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}.", fix=f"use a whole number from {least} on.")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}.", fix="use True or False.")
    return value


def _folder(value: object) -> str:
    path = Path(str(value)).expanduser().absolute()
    try:
        file = path.exists() and not path.is_dir()
    except OSError as error:
        raise ConfigError(f"cache_dir {path} cannot be read: {error}.", fix="name another folder.") from error
    if file:
        raise ConfigError(f"cache_dir is {path}, which is a file.", fix="name a folder.")
    return str(path)


OPTIONS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "performance_hint": ("PERFORMANCE_HINT", _hint),
    "streams": ("NUM_STREAMS", _streams),
    "pinning": ("ENABLE_CPU_PINNING", lambda value: _flag("pinning", value)),
    "cache_dir": ("CACHE_DIR", _folder),
    "dynamic_quantization_group_size": (
        "DYNAMIC_QUANTIZATION_GROUP_SIZE",
        lambda value: _count("dynamic_quantization_group_size", value, 0),
    ),
    "runtime_cache_capacity": (
        "CPU_RUNTIME_CACHE_CAPACITY",
        lambda value: _count("runtime_cache_capacity", value, 0),
    ),
}
"""Our options: OpenVINO's property, and what checks and translates a value."""


def properties(device: str, options: Mapping[str, object], session: SessionOptions, dtype: str) -> dict[str, Any]:
    """OpenVINO's properties for a compile call.

    Args:
        device: OpenVINO's name of the device.
        options: Ours by name, or OpenVINO's own in capitals.
        session: How to run; `native` holds OpenVINO's own properties as well.
        dtype: What to compute in.

    Raises:
        ConfigError: An option that neither we nor OpenVINO have, or a value that cannot work.
    """
    made: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": PRECISIONS[dtype]}
    if device != "CPU" and session.threads is not None:
        raise ConfigError(f"{device} has no threads to set.", fix="leave threads out, or use the device 'cpu'.")
    # Also where the processor is one of the devices to choose from.
    processor = _on_the_processor(session, dtype) if device == "CPU" or device.startswith("AUTO") else {}
    if session.inter_op_threads != 1:
        raise ConfigError("OpenVINO has no inter-operator threads.", fix="use the option streams=... instead.")
    if session.graph_optimization != "all":
        raise ConfigError(
            f"OpenVINO has no graph optimization level {session.graph_optimization!r}.", fix="leave it out."
        )
    if session.profile is not None:
        made["PERF_COUNT"] = True
    for name, value in {**options, **session.native}.items():
        own = name if name in processor else None
        word, translate = OPTIONS.get(name) or (own or _native(device, name), lambda given: given)
        (processor if word in processor else made)[word] = translate(value)
    if processor and device != "CPU":
        return {**made, "DEVICE_PROPERTIES": {"CPU": processor}}
    return made | processor


def _on_the_processor(session: SessionOptions, dtype: str) -> dict[str, Any]:
    return {
        "INFERENCE_NUM_THREADS": session.threads or available_processors(),
        "ENABLE_CPU_PINNING": False,
        # OpenVINO quantizes the activations in front of compressed weights to 8 bits by default.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        # It keeps keys and values in half precision or in 8 bits where a graph's file says so.
        "KV_CACHE_PRECISION": PRECISIONS[dtype],
        # Kernels are kept for each shape of each layer, 5,000 by OpenVINO's default: gigabytes where lengths vary.
        "CPU_RUNTIME_CACHE_CAPACITY": 1500,
    }


def _native(device: str, name: str) -> str:
    """OpenVINO's own property of that name.

    Raises:
        ConfigError: There is none that can be set.
    """
    listed = core().get_property(device, "SUPPORTED_PROPERTIES")
    known = [word for word, mode in listed.items() if mode in _SETTABLE] + list(_CORE_PROPERTIES)
    if name in known:
        return name
    close = did_you_mean(name, known if name.isupper() else OPTIONS)
    raise ConfigError(
        f"OpenVINO has no option {name!r} for {device}.{close}",
        fix=f"use one of {', '.join(OPTIONS)}, or a property of OpenVINO in capitals.",
    )
