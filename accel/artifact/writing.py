"""Folders come into being whole or not at all: a temporary folder beside the target, moved into place when complete."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .._version import __version__
from ..errors import OutputFolderError
from .manifest import MANIFEST

logger = logging.getLogger(__name__)

_STAGING_PREFIX = ".accel-staging-"
_STAGING_MAX_AGE_S = 24 * 3600

# Small files that travel with a model: configs, tokenizers, processors, sentence-transformers' module list.
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe")
_NOT_COMPANIONS = (
    ".index.json",
    MANIFEST,
    "export.json",
    "ort_config.json",
    "trainer_state.json",
    "adapter_config.json",
)
_COMPANION_MAX_BYTES = 64 << 20


def check_output(out: str | os.PathLike[str], *inputs: Path | None) -> Path:
    """The absolute output folder, refused when it is an input or holds something.

    Raises:
        OutputFolderError: With what is in the way.
    """
    target = Path(out).expanduser().absolute()
    for source in inputs:
        if source is not None and source.exists() and target.resolve() == source.resolve():
            raise OutputFolderError(f"{target} is also the input.", fix="name another output folder.")
    if target.is_dir() and any(target.iterdir()):
        raise OutputFolderError(f"{target} is not empty.", fix="name a new folder, or remove this one first.")
    if target.exists() and not target.is_dir():
        raise OutputFolderError(f"{target} is a file.", fix="name a folder.")
    return target


@contextmanager
def staging(out: str | os.PathLike[str]) -> Iterator[Path]:
    """A new folder beside `out` that becomes `out` when the block ends well and vanishes when it does not.

    A killed process leaves at most a folder whose name starts with `.accel-staging-`; the next run beside it removes
    those whose process is gone.
    """
    target = check_output(out)
    temporary = target.parent / f"{_STAGING_PREFIX}{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        temporary.mkdir()
    except OSError as error:
        raise OutputFolderError(
            f"{target} cannot be made: {error}.", fix="name a folder that can be written."
        ) from error
    try:
        yield temporary
        try:
            temporary.replace(target)
        except OSError as error:
            raise OutputFolderError(
                f"{target} appeared while it was being made: {error}.", fix="use that one."
            ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@functools.cache
def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _remove_stale(folder: Path) -> None:
    for entry in folder.glob(f"{_STAGING_PREFIX}*"):
        host, pid, *_ = entry.name.removeprefix(_STAGING_PREFIX).split("-")
        try:
            old = time.time() - entry.stat().st_mtime > _STAGING_MAX_AGE_S
        except OSError:
            continue
        if old or (host == _host() and pid.isdigit() and not _alive(int(pid))):
            logger.info("removing %s, left by an interrupted run", entry)
            shutil.rmtree(entry, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def copy_companions(source: Path, target: Path) -> None:
    """Copy configs, tokenizer and processor files (and sentence-transformers' folders of them), but no weights."""
    for path in sorted(source.iterdir()):
        if path.is_dir() and any(path.glob("config.json")) and path.name[:1].isdigit():
            (target / path.name).mkdir(exist_ok=True)
            shutil.copyfile(path / "config.json", target / path.name / "config.json")
        elif (
            path.is_file()
            and path.name.endswith((*_COMPANION_SUFFIXES, ".py"))
            and not path.name.endswith(_NOT_COMPANIONS)
            and path.stat().st_size <= _COMPANION_MAX_BYTES
            and not (target / path.name).exists()
        ):
            shutil.copyfile(path, target / path.name)


@functools.cache
def tool_versions(*distributions: str) -> dict[str, str]:
    """Versions of installed distributions, `accel` and Python; those not installed are left out."""
    from importlib import metadata

    versions = {"accel": __version__, "python": platform.python_version()}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
