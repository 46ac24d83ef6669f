"""Tested versions of libraries, and a warning for other versions.

The requirements of the package allow wide version ranges. Private names of the libraries are used only in `accel.upstream`, so
other versions usually work as well.
"""

from __future__ import annotations

import functools
import logging
from importlib import metadata

from packaging.version import Version

logger = logging.getLogger(__name__)

TESTED = (
    ("onnx", "1.19", "1.23"),
    ("onnx_ir", "0.1.16", "1.1"),
    ("onnxscript", "0.7", "0.7"),
    ("torch", "2.11", "2.15"),
    ("transformers", "5.23", "5.24"),
)
"""Libraries whose version-dependent names accel's core uses, with the oldest and the newest tested release line."""


def untested(distribution: str, oldest: str, newest: str) -> str | None:
    """Return the installed version if it was not tested. Return `None` if it was tested or is not installed.

    Args:
        distribution: Name on the package index.
        oldest: The oldest tested release.
        newest: The newest tested release line: `"2.13"` includes 2.13.1.
    """
    try:
        version = Version(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None
    last = Version(newest)
    line = Version(".".join(str(part) for part in version.release[: len(last.release)]))
    return None if Version(oldest) <= version and line <= last else str(version)


@functools.cache
def warn_of_untested_versions(tested: tuple[tuple[str, str, str], ...]) -> None:
    """Warn once about each library whose installed version was not tested.

    Args:
        tested: Distributions with the oldest and the newest tested release line, as in `TESTED`.
    """
    for distribution, oldest, newest in tested:
        if version := untested(distribution, oldest, newest):
            logger.warning(
                "The installed version of %s, %s, was not tested with this version of accel (tested: %s to %s). If an error occurs, "
                'install a tested version: pip install "%s==%s.*"',
                *(distribution, version, oldest, newest, distribution, newest),
            )
