"""Prevent conflicts between installed libraries and accel packages that have the same import names."""

from __future__ import annotations

from importlib import metadata

from ...errors import BackendUnavailableError


def refuse_if_installed(*distributions: str) -> None:
    """Raise if a library is installed whose import names an accel package also provides.

    Raises:
        BackendUnavailableError: A library is installed. The message has the command that removes either package.
    """
    for name in distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        raise BackendUnavailableError(
            f"The packages {name} {version} and accel-sentence-transformers are both installed, and both contain Python modules with the "
            "same names.",
            fix=f"run `pip uninstall {name} accel-sentence-transformers`, then install one of the two packages again.",
        )
