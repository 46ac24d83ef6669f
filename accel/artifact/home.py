"""Where `accel` keeps what it makes on the way: `ACCEL_HOME`."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError

SEARCHES = "tune"
"""Name of the entry that holds what searches keep, and of its folder."""


def accel_home() -> Path:
    """Where on-the-fly exports and caches live: `$ACCEL_HOME`, or `accel` in the user's cache folder.

    Raises:
        ConfigError: This user has no home.
    """
    try:
        if home := os.environ.get("ACCEL_HOME"):
            return Path(home).expanduser().absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().absolute() / "accel"
    except RuntimeError as error:
        raise ConfigError(
            f"There is no folder for caches: {error}", fix="set ACCEL_HOME to a folder that can be written."
        ) from error
