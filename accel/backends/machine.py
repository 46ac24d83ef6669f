"""Facts about this machine and the installed software that measurements depend on."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

from .._version import __version__
from ..artifact.atomic_folder_writing import tool_versions
from ..artifact.home_folder import accel_home
from ..config import available_processors
from ..errors import ConfigError
from ..interfaces.specs import Reason
from . import registry

_LIBRARIES = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "datasets")


def machine() -> dict[str, Any]:
    """Return the facts about the machine and software that measurements depend on."""
    names = tools()
    return {
        "accel": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": available_processors(),
        "processors_of_machine": os.cpu_count(),
        "libraries": {name: version for name, version in tool_versions(*names).items() if name in names},
        "home": _home(),
        "executable": sys.executable,
    }


def _home() -> str:
    """Return the cache folder, or the error message if there is none."""
    try:
        return str(accel_home())
    except ConfigError as error:
        return str(error.message)


def tools() -> tuple[str, ...]:
    """Return the packages whose versions affect artifacts and measurements: those of accel, and those that the backends
    name.
    """
    return tuple(
        dict.fromkeys((*_LIBRARIES, *(name for spec in registry.describe_all()[0] for name in spec.distributions)))
    )


def conflicts() -> list[Reason]:
    """Return conflicts between installed packages, as declared by the specs of the backends."""
    pairs = {pair for spec in registry.describe_all()[0] for pair in spec.conflicts}
    return [
        Reason(
            "conflict",
            f"{first} and {second} are both installed, but they have the same import name and overwrite each other's files",
            f"run `pip uninstall -y {first} {second}`, then install only the package that you want",
        )
        for first, second in sorted(pairs)
        if {first, second} <= tool_versions(first, second).keys()
    ]
