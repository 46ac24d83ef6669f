"""Check that Optimum is not installed next to accel-sentence-transformers, which contains Python modules with the same names."""

from __future__ import annotations

from importlib import metadata

from ...errors import BackendUnavailableError


def refuse_if_installed(*distributions: str) -> None:
    """Raise an error if one of the given packages is installed, because it contains modules with the same names.

    Raises:
        BackendUnavailableError: One of the packages is installed. The message contains a command that solves the conflict.
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
