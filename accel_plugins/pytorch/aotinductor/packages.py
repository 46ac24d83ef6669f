"""Packages of compiled code: trust, target processor and loading.

A package contains native code, which can do anything in the process that loads it. accel opens a package without
questions if this user compiled it on this machine. Other packages require `trust_remote_code=True`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from accel.artifact import Artifact, Component, accel_home, scratch, sha256
from accel.capture import quiet
from accel.errors import ConfigError, SessionError, TargetMismatchError

from ..upstream import load_package, package_metadata

logger = logging.getLogger(__name__)

FORMAT = "pt2"
"""Format name of artifacts that are packages of compiled code."""
# SHA-256 checksums of packages that this process compiled. Other processes look for marker files in the `accel` home
# folder.
_COMPILED: set[str] = set()


def _mark(checksum: str) -> Path:
    return accel_home() / "packages" / checksum


def remember(component: Component) -> None:
    """Record that a package was compiled on this machine. The checksum of the package is stored in memory and as the
    name of an empty file in the `accel` home folder.
    """
    checksum = next(record.sha256 for record in component.files if record.name == component.file)
    _COMPILED.add(checksum)
    try:
        mark = _mark(checksum)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except (OSError, ConfigError) as error:
        logger.warning(
            "accel cannot store the checksum of the compiled package in ACCEL_HOME (%s). Other processes therefore open the package "
            "only with trust_remote_code=True.",
            error,
        )


@contextmanager
def trusted(package: Path, *, trust_remote_code: bool) -> Iterator[Path]:
    """Yield the path of the package file to load.

    With `trust_remote_code`, this is the path of the package itself. Otherwise it is the path of a private copy, so
    that nobody can change the file between the check and the loading. The checksum of the copy must be the checksum of
    a package that was compiled on this machine. Checksums in the manifest are not used, because the author of a harmful
    package could have written them.

    Raises:
        ConfigError: The package was not compiled on this machine, and `trust_remote_code` is False.
        SessionError: The package cannot be read, or the copy cannot be written.
    """
    if trust_remote_code:
        yield package
        return
    with ExitStack() as stack:
        try:
            copy = stack.enter_context(scratch()) / package.name
            shutil.copyfile(package, copy)
            checksum = sha256(copy)
        except OSError as error:
            raise SessionError(
                f"{package} cannot be copied into the folder for temporary files, where accel checks the file: {error}",
                fix="set the environment variable TMPDIR to a writable folder with enough free space.",
            ) from error
        if checksum not in _COMPILED and not _mark(checksum).is_file():
            raise ConfigError(
                f"{package.parent} contains native code that was not compiled on this machine. Native code from an unknown author "
                "can harm your machine.",
                fix="pass trust_remote_code=True (--trust-remote-code) if you trust the author, or export the model yourself.",
            )
        yield copy


def target_of(package: Path) -> dict[str, Any]:
    """Return the device, CPU instruction set and PyTorch version that a new package needs."""
    metadata = package_metadata(package)
    return {
        "device": metadata.get("AOTI_DEVICE_KEY", "cpu"),
        "machine": metadata.get("AOTI_CPU_ISA", ""),
        "torch": _torch_version(),
    }


def check_target(artifact: Artifact) -> None:
    """Raise if an artifact was compiled for another processor or another PyTorch version.

    Raises:
        TargetMismatchError: The target differs; the message shows the target and the installed PyTorch version.
    """
    target: Mapping[str, Any] = artifact.manifest.target or {}
    if (
        target.get("device") == "cpu"
        and target.get("torch") == _torch_version()
        and _computes(str(target.get("machine", "")))
    ):
        return
    raise TargetMismatchError(
        f"{artifact.path} was compiled for {dict(target)}. This machine has a different processor or a different version of "
        f"PyTorch (torch {_torch_version()}).",
        fix="export the model again on this machine (--backend aotinductor), or run it on a machine that matches these values.",
    )


def _computes(instructions: str) -> bool:
    """Return whether this processor has all instruction sets in a list such as "AVX2 FMA" (names of PyTorch's
    compiler).
    """
    has = torch.cpu.get_capabilities()
    # PyTorch's compiler writes AVX512 for the CPU flag avx512_f.
    return all(has.get(word) or has.get(f"{word}_f") for word in instructions.lower().split())


def opened(package: Path) -> Any:
    """Load a package. The `run` method of the result takes and returns flat lists of tensors.

    Raises:
        SessionError: PyTorch cannot load the package.
    """
    try:
        with quiet():
            return load_package(package)
    except Exception as error:
        raise SessionError(
            f"PyTorch cannot load the package {package}: {error}", fix="export the model again."
        ) from error


def _torch_version() -> str:
    return torch.__version__.partition("+")[0]
