"""Execution providers in separate shared libraries (plugin providers), which ONNX Runtime loads at run time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort

from accel.errors import BackendUnavailableError
from accel.interfaces.specs import DeviceSpec

_lock = threading.Lock()
_registered: dict[str, Path] = {}
_brought: dict[str, tuple[str, ...]] = {}


def register_library(provider: str, path: Path) -> None:
    """Make ONNX Runtime load a provider's library; later calls with the same library do nothing.

    Args:
        provider: ONNX Runtime's name of the provider, under which the library is registered.
        path: The path of the library.

    Raises:
        BackendUnavailableError: The file does not exist, the library does not load, or another library was registered
            for the provider.
    """
    library = path.absolute()
    with _lock:
        if provider in _registered:
            if _registered[provider] != library:
                raise BackendUnavailableError(
                    f"This process has already loaded {_registered[provider]} for {provider}, and cannot load a second library {library}.",
                    fix="uninstall one of the two packages that contain these libraries, and restart the process.",
                )
            return
        if not library.is_file():
            raise BackendUnavailableError(
                f"The library of {provider} cannot be loaded, because there is no file {library}"
            )
        earlier_names = {device.ep_name for device in ort.get_ep_devices()}
        try:
            ort.register_execution_provider_library(provider, str(library))
        # ONNX Runtime's exception types have no common base class, so catch every exception and report its message.
        except Exception as error:
            text = " ".join(str(error).split())[:600]
            raise BackendUnavailableError(
                f"ONNX Runtime cannot load {library} for {provider}, although the file exists: {text}",
                fix="install the missing libraries in the message above, or a build of the provider for ONNX Runtime "
                f"{ort.__version__}.",
            ) from error
        _registered[provider] = library
        _brought[provider] = tuple(sorted({device.ep_name for device in ort.get_ep_devices()} - earlier_names))


def other_providers(provider: str) -> tuple[str, ...]:
    """Return the names of the providers in the library that was registered for `provider`, if none has this name.

    Return an empty tuple if the library contains `provider`.
    """
    names = _brought.get(provider, ())
    return () if provider in names else names


def provider_devices(provider: str) -> tuple[ort.OrtEpDevice, ...]:
    """Return ONNX Runtime's devices of a provider, in ONNX Runtime's order.

    A provider in a separate library has devices only after the library is registered.
    """
    return tuple(device for device in ort.get_ep_devices() if device.ep_name == provider)


def device_specs(
    devices: tuple[ort.OrtEpDevice, ...], type_names: Mapping[str, str] | None = None
) -> tuple[DeviceSpec, ...]:
    """Convert ONNX Runtime's devices to device specs, numbered separately by type.

    Args:
        devices: The devices.
        type_names: Other names for ONNX Runtime's types `cpu`, `gpu` and `npu`.
    """
    counts: dict[str, int] = {}
    specs = []
    for device in devices:
        kind = device.device.type.name.lower()
        kind = (type_names or {}).get(kind, kind)
        index = counts[kind] = counts.get(kind, -1) + 1
        name = " ".join((device.device.vendor or device.ep_vendor).split())
        specs.append(DeviceSpec(kind, index, name=device.device.metadata.get("Description", name)))
    return tuple(specs)
