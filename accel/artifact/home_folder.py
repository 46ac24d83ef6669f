"""`ACCEL_HOME`: the folder for automatic exports and caches."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigError, OutputFolderError

_REMEDY = "set the environment variable ACCEL_HOME to a folder that you may write to"
SEARCHES = "tune"
"""Name of the cache entry for search results, and of its folder."""


def accel_home() -> Path:
    """Return the folder for automatic exports and caches: `$ACCEL_HOME`, or `accel` in the user's cache folder.

    Raises:
        ConfigError: The user has no home folder, or the path is not a readable folder.
    """
    try:
        if named := os.environ.get("ACCEL_HOME"):
            home = Path(named).expanduser().absolute()
        else:
            home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().absolute() / "accel"
    except RuntimeError as error:
        raise ConfigError(f"accel finds no folder for its cache: {error}", fix=f"{_REMEDY}.") from error
    try:
        readable = stat.S_ISDIR(home.stat().st_mode) and os.access(home, os.R_OK | os.X_OK)
    except FileNotFoundError:
        # The folder is created at the first write.
        return home
    except OSError as error:
        raise ConfigError(f"The cache folder of accel cannot be read: {error}.", fix=f"{_REMEDY}.") from error
    if not readable:
        raise ConfigError(f"The cache folder of accel, {home}, is not a folder or is not readable.", fix=f"{_REMEDY}.")
    return home


@contextmanager
def keeping(data_name: str) -> Iterator[None]:
    """Convert an `OSError` while writing under `ACCEL_HOME` into an error that names this setting.

    Args:
        data_name: Name of the data being written, for the error message.

    Raises:
        OutputFolderError: The folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise OutputFolderError(
            f"{data_name} cannot be saved in the cache folder of accel: {error}.",
            fix=f"{_REMEDY} and that has free space.",
        ) from error
