"""Optimum's functions that convert between torch devices and execution providers of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...backends import registry
from ...errors import ConfigError


def get_device_for_provider(provider: str, provider_options: Mapping[str, Any]) -> torch.device:
    """Return the torch device on which an execution provider of ONNX Runtime computes."""
    if provider in ("CUDAExecutionProvider", "TensorrtExecutionProvider", "ROCMExecutionProvider"):
        return torch.device("cuda", int(provider_options.get("device_id", 0)))
    return torch.device("cpu")


def get_provider_for_device(device: torch.device) -> str:
    """Return the name of the ONNX Runtime execution provider for a torch device.

    Raises:
        ConfigError: No backend supports the device.
    """
    for spec in registry.describe_all()[0]:
        capability = spec.capability("run", "onnx")
        names = [name for name in spec.aliases if name.endswith("ExecutionProvider")]
        if capability is not None and names and capability.devices[0] == device.type:
            return names[0]
    raise ConfigError(f"No ONNX Runtime execution provider supports the device '{device}'.", fix="use 'cpu' or 'cuda'.")
