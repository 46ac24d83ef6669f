"""Whether our names may stand where Optimum's own would."""

from __future__ import annotations

from importlib import metadata

from ...errors import BackendUnavailableError


def stand_in_for(*distributions: str) -> None:
    """Refuse to take the place of libraries that are installed.

    Raises:
        BackendUnavailableError: One is; with the command that removes either.
    """
    for name in distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        raise BackendUnavailableError(
            f"{name} {version} and accel-sentence-transformers are both installed, and have the same names.",
            fix=f"pip uninstall {name} accel-sentence-transformers, then install one of them again.",
        )
