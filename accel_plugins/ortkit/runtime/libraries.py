"""Execution providers that come as a shared library of their own, which ONNX Runtime loads at run time (plugin providers)."""

from __future__ import annotations

import threading
from pathlib import Path

import onnxruntime as ort

from accel.errors import BackendUnavailableError
from accel.interfaces.specs import DeviceSpec

_lock = threading.Lock()
_registered: dict[str, Path] = {}
_brought: dict[str, tuple[str, ...]] = {}


def register_library(provider: str, path: Path) -> None:
    """Have ONNX Runtime load a provider's library; once a process, later calls do nothing.

    Args:
        provider: ONNX Runtime's name of the provider, under which the library is registered.
        path: The library.

    Raises:
        BackendUnavailableError: There is no such file, it does not load, or another library was registered for the provider.
    """
    wanted = path.absolute()
    with _lock:
        if provider in _registered:
            if _registered[provider] != wanted:
                raise BackendUnavailableError(
                    f"{provider}: this process has loaded {_registered[provider]}, and is now to load {wanted}.",
                    fix="keep one of the two installed.",
                )
            return
        if not wanted.is_file():
            raise BackendUnavailableError(f"{provider}: there is no library {wanted}")
        before = {device.ep_name for device in ort.get_ep_devices()}
        try:
            ort.register_execution_provider_library(provider, str(wanted))
        # ONNX Runtime raises types of its own without a common base; whatever the loader says is the reason.
        except Exception as error:
            text = " ".join(str(error).split())[:600]
            raise BackendUnavailableError(
                f"{provider}: ONNX Runtime cannot load {wanted}: {text}",
                fix="install the libraries that it names, or a build of the provider for ONNX Runtime "
                f"{ort.__version__}; the file itself is there.",
            ) from error
        _registered[provider] = wanted
        _brought[provider] = tuple(sorted({device.ep_name for device in ort.get_ep_devices()} - before))


def other_providers(provider: str) -> tuple[str, ...]:
    """Names of the providers that the library of one brought, where its own name is not among them."""
    names = _brought.get(provider, ())
    return () if provider in names else names


def provider_devices(provider: str) -> tuple[ort.OrtEpDevice, ...]:
    """ONNX Runtime's devices of a provider, in its order; of providers in a library, once that is registered."""
    return tuple(device for device in ort.get_ep_devices() if device.ep_name == provider)


def device_specs(devices: tuple[ort.OrtEpDevice, ...]) -> tuple[DeviceSpec, ...]:
    """ONNX Runtime's devices in our words: `cpu`, `gpu` or `npu`, numbered by type."""
    counts: dict[str, int] = {}
    specs = []
    for one in devices:
        kind = one.device.type.name.lower()
        index = counts[kind] = counts.get(kind, -1) + 1
        name = " ".join((one.device.vendor or one.ep_vendor).split())
        specs.append(DeviceSpec(kind, index, name=one.device.metadata.get("Description", name)))
    return tuple(specs)
