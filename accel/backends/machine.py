"""Facts about this machine and what is installed, which measurements depend on."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

from .._version import __version__
from ..artifact.home import accel_home
from ..config import available_processors
from ..errors import ConfigError
from ..interfaces.specs import Reason
from . import registry

_LIBRARIES = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "datasets")


def machine() -> dict[str, Any]:
    """Facts that measurements depend on."""
    return {
        "accel": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": available_processors(),
        "processors_of_machine": os.cpu_count(),
        "libraries": {name: version for name in tools() if (version := _version(name)) is not None},
        "home": _home(),
        "executable": sys.executable,
    }


def _home() -> str:
    """The folder for caches, or why there is none."""
    try:
        return str(accel_home())
    except ConfigError as error:
        return str(error.message)


def tools() -> tuple[str, ...]:
    """Distributions whose versions decide what is made and measured: ours, and those that the backends name."""
    return tuple(
        dict.fromkeys((*_LIBRARIES, *(name for spec in registry.describe_all()[0] for name in spec.distributions)))
    )


def conflicts() -> list[Reason]:
    """Installations that cannot work together, as the backends name them."""
    pairs = {pair for spec in registry.describe_all()[0] for pair in spec.conflicts}
    return [
        Reason(
            "conflict",
            f"{first} and {second} are both installed; they own the same import name and overwrite each other",
            f"pip uninstall -y {first} {second}, then install the one you want",
        )
        for first, second in sorted(pairs)
        if _version(first) and _version(second)
    ]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
