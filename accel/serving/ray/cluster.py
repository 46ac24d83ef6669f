"""Connect to a Ray cluster, or start a cluster on this machine."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...config import available_processors
from ...errors import BackendUnavailableError, ConfigError

_STORE_BYTES = 200_000_000
"""Size of Ray's shared memory in bytes for a cluster on this machine. It is small, because only small values are stored."""


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connect to a Ray cluster, yield the module `ray`, and disconnect afterwards.

    Args:
        address: `auto`, `HOST:PORT` or `ray://HOST:PORT`. `None` starts a cluster on this machine and ignores `RAY_ADDRESS`.

    Raises:
        BackendUnavailableError: Ray is not installed, or there is no cluster at the address.
    """
    # Disable Ray's usage reports by default. Ray reads the variable at import.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise BackendUnavailableError("Ray is not installed.", fix='pip install "accel-transformers[ray]"') from error
    ours = not ray.is_initialized()
    try:
        if ours and address is None:
            ray.init(
                address="local", num_cpus=available_processors(), object_store_memory=_STORE_BYTES, include_dashboard=False,
                logging_level=logging.WARNING, log_to_driver=False,
            )  # fmt: skip
        elif ours:
            ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        action = (
            "start a Ray cluster on this machine" if address is None else f"connect to the Ray cluster at {address}"
        )
        raise BackendUnavailableError(
            f"accel could not {action}: {error}",
            fix="check the address (--address); `ray status` shows the state of a cluster.",
        ) from error
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def replicas_of(text: str) -> tuple[int, int]:
    """Parse a number of replicas, such as `4` or `1:4`, and return the smallest and the greatest number.

    Raises:
        ConfigError: The text has another form.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least = int(match[1]) if match else 0
    most = int(match[2] or match[1]) if match else 0
    if not 1 <= least <= most:
        raise ConfigError(
            f"{text!r} is not a number of replicas.",
            fix="write a number such as 4, or a range such as 1:4 to change the number with the load.",
        )
    return least, most
