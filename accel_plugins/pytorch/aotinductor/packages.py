"""Files of compiled code: whom they come from, what they were compiled for, and opening them.

A package is native code, which does what it likes in the process that loads it. What this user compiled here opens; what came from
elsewhere only where its code is trusted, as code that comes with a PyTorch model.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from accel.artifact import Artifact, Component, accel_home, scratch
from accel.capture import quiet
from accel.errors import ConfigError, SessionError, TargetMismatchError

logger = logging.getLogger(__name__)

FORMAT = "pt2"
"""The format of artifacts that are packages of compiled code."""
_BLOCK = 1 << 20
# Checksums of packages that this process compiled; other processes read notes in the home.
_COMPILED: set[str] = set()


def _mark(checksum: str) -> Path:
    return accel_home() / "packages" / checksum


def remember(component: Component) -> None:
    """Note that a package was compiled here, by its checksum."""
    checksum = next(record.sha256 for record in component.files if record.name == component.file)
    _COMPILED.add(checksum)
    try:
        mark = _mark(checksum)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except (OSError, ConfigError) as error:
        logger.warning(
            "it cannot be noted that this was compiled here (%s): in other processes the package opens with trust_remote_code=True.",
            error,
        )


@contextmanager
def trusted(package: Path, *, trust_remote_code: bool) -> Iterator[Path]:
    """What may be loaded of a package: itself where its code is trusted, else a copy in which nobody else can write.

    The copy is what is held against the notes of what was compiled here. Neither the manifest nor what is remembered of checked files
    is asked, which whoever made or changed the folder had a hand in.

    Raises:
        ConfigError: It was not compiled here, and its code is not trusted.
        SessionError: It cannot be read, or the copy not be written.
    """
    if trust_remote_code:
        yield package
        return
    with ExitStack() as stack:
        try:
            copy = stack.enter_context(scratch()) / package.name
            checksum = _copied(package, copy)
        except OSError as error:
            raise SessionError(
                f"{package} cannot be copied into the folder for temporary files, where its code is checked: {error}",
                fix="set TMPDIR to a folder with room for it that can be written.",
            ) from error
        if checksum not in _COMPILED and not _mark(checksum).is_file():
            raise ConfigError(
                f"{package.parent} holds native code that was not compiled here, which may do anything once it is loaded.",
                fix="pass trust_remote_code=True (--trust-remote-code) where you trust who compiled it, or export the model yourself.",
            )
        yield copy


def _copied(source: Path, target: Path) -> str:
    """Copy a file, which may change meanwhile; the checksum of what was written."""
    digest = hashlib.sha256()
    with source.open("rb") as read, target.open("xb") as write:
        while block := read.read(_BLOCK):
            digest.update(block)
            write.write(block)
    return digest.hexdigest()


def target_of(package: Path) -> dict[str, Any]:
    """What a package that was just compiled runs on."""
    found = metadata(package)
    return {
        "device": found.get("AOTI_DEVICE_KEY", "cpu"),
        "machine": found.get("AOTI_CPU_ISA", ""),
        "torch": _torch_version(),
    }


def check_target(artifact: Artifact) -> None:
    """Refuse code that is not for these processors or this PyTorch.

    Raises:
        TargetMismatchError: It was compiled for others.
    """
    target: Mapping[str, Any] = artifact.manifest.target or {}
    if (
        target.get("device") == "cpu"
        and target.get("torch") == _torch_version()
        and _computes(str(target.get("machine", "")))
    ):
        return
    raise TargetMismatchError(
        f"{artifact.path} was compiled for {dict(target)}, which does not run here (torch {_torch_version()}).",
        fix="export the model here (--backend aotinductor), or open it on a machine like that.",
    )


def _computes(instructions: str) -> bool:
    """Whether these processors have the compiler's instructions."""
    has = torch.cpu.get_capabilities()
    # AVX512 is the foundation of it, whose name has an F at its end.
    return all(has.get(word) or has.get(f"{word}_f") for word in instructions.lower().split())


def opened(package: Path) -> Any:
    """What runs a package: takes and gives flat lists of tensors.

    Raises:
        SessionError: PyTorch cannot load it.
    """
    try:
        with quiet():
            return torch._inductor.aoti_load_package(str(package)).loader
    except Exception as error:
        raise SessionError(f"PyTorch cannot load {package}: {error}", fix="export the model again.") from error


def metadata(package: Path) -> dict[str, str]:
    """What the compiler wrote into a package about its device."""
    from torch._C import _aoti

    loader: Any = _aoti.AOTIModelPackageLoader
    return dict(loader.load_metadata_from_package(str(package), "model"))


def _torch_version() -> str:
    return torch.__version__.partition("+")[0]
