"""A connection to Ray: a cluster that runs somewhere, or one of this machine that ends with us."""

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
"""Of shared memory that a cluster of this machine takes: what passes through it is small."""


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The module `ray`, connected.

    Args:
        address: `auto`, `HOST:PORT` or `ray://HOST:PORT`; `None` starts one here, whatever `RAY_ADDRESS` says.

    Raises:
        BackendUnavailableError: Ray is not installed, or nothing answers at the address.
    """
    # Before it is imported: nobody asked for reports about us.
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
        raise BackendUnavailableError(
            f"There is no Ray cluster at {address}: {error}", fix="check --address, and the cluster with `ray status`."
        ) from error
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def replicas_of(text: str) -> tuple[int, int]:
    """The least and the most: of `4` or `1:4`.

    Raises:
        ConfigError: Neither.
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least = int(found[1]) if found else 0
    most = int(found[2] or found[1]) if found else 0
    if not 1 <= least <= most:
        raise ConfigError(f"{text!r} is no number of replicas.", fix="write 4, or 1:4 for one that follows the load.")
    return least, most
