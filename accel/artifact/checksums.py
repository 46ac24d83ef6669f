"""Files by size and checksum, and how a changed one is found."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, Self

from ..errors import ConfigError, IntegrityError
from .home import accel_home

logger = logging.getLogger(__name__)

_VERIFIED = "verified.json"
_KEPT = 2000
_LARGE = 1 << 20
_LONGEST_NAME = 1024
_GRAPH_SUFFIXES = (".onnx", ".data", ".xml", ".bin", ".safetensors", ".pt2")
_REMEDY = "make the artifact again, or copy the file again from where it came"
_ON_PURPOSE = f"{_REMEDY}; where it was changed on purpose (a tokenizer saved over another): `accel validate FOLDER --accept-files`."


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a component: its name relative to the folder, its size in bytes and its checksum."""

    name: str
    bytes: int
    sha256: str


def sha256(path: Path) -> str:
    """The file's checksum in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_files(folder: Path, names: Sequence[str]) -> tuple[FileRecord, ...]:
    """Sizes and checksums of files in `folder`."""
    return tuple(FileRecord(name=n, bytes=(folder / n).stat().st_size, sha256=sha256(folder / n)) for n in names)


def verify(folder: Path, records: Sequence[FileRecord]) -> None:
    """Compare files with their records; of large ones the result is remembered by inode, size and times of change.

    Raises:
        IntegrityError: The first file that is missing, truncated or changed, or lies outside the folder.
    """
    with _Checksums() as checksums:
        for record in records:
            path = folder / _checked_name(folder, record.name)
            fix = f"{_REMEDY}." if path.suffix in _GRAPH_SUFFIXES else _ON_PURPOSE
            stat = check_file(path, folder, fix=fix)
            if stat.st_size != record.bytes:
                raise IntegrityError(
                    f"{path} has {stat.st_size} bytes instead of {record.bytes}: truncated or changed.", fix=fix
                )
            checksum = checksums.of(path, stat)
            if checksum != record.sha256:
                raise IntegrityError(
                    f"{path} has checksum {checksum[:12]}… instead of {record.sha256[:12]}…: changed.", fix=fix
                )


class _Checksums:
    """Checksums of files, those of large ones remembered from one process to the next by inode, size and times of change."""

    def __init__(self) -> None:
        self._known: dict[str, Any] | None = None
        self._found: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._found:
            remember(_VERIFIED, self._found)

    def of(self, path: Path, stat: os.stat_result) -> str:
        """The checksum of a file of which the system says that."""
        if stat.st_size <= _LARGE:
            return sha256(path)
        # The time of the last change of any kind cannot be set back, as that of the content can.
        key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
        if self._known is None:
            self._known = recall(_VERIFIED)
        known = self._known.get(key)
        if isinstance(known, str):
            return known
        self._found[key] = sha256(path)
        return self._found[key]


def check_file(path: Path, folder: Path, *, fix: str) -> os.stat_result:
    """What the system says of a file that belongs to a folder; it is not opened.

    Raises:
        IntegrityError: It is missing, no regular file, or a link that leaves the folder.
    """
    try:
        stat = path.stat()
    # A name that no file can have is a `ValueError`.
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} is missing.", fix=fix) from error
    if not S_ISREG(stat.st_mode):
        # A pipe would be read for ever.
        raise IntegrityError(f"{path} is no regular file.", fix=fix)
    if not is_inside(path, folder):
        raise IntegrityError(f"{path} is a link to {path.resolve()}, outside of the folder.", fix=fix)
    return stat


def _checked_name(folder: Path, name: str) -> str:
    """A file's name in its folder.

    Raises:
        IntegrityError: It is none: it leaves the folder, or no file has such a name.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or len(name) > _LONGEST_NAME:
        raise IntegrityError(
            f"The manifest of {folder} names a file outside the folder: {name[:_LONGEST_NAME]!r}.", fix=f"{_REMEDY}."
        )
    return name


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a file is within its folder; a file of a Hub snapshot may also be a link into the repository's own blobs."""
    real, root = path.resolve(), folder.resolve()
    if real.is_relative_to(root):
        return True
    snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
    return snapshots is not None and real.is_relative_to(snapshots.parent / "blobs")


def recall(name: str) -> dict[str, Any]:
    """What `remember` kept in the home's file of that name; empty where it is damaged or missing."""
    try:
        values = json.loads((accel_home() / name).read_text(encoding="utf-8"))
        return values if isinstance(values, dict) else {}
    except (OSError, ValueError, ConfigError):
        return {}


def remember(name: str, found: Mapping[str, object]) -> None:
    """Keep results of checks in a file of the home, so that they are not done again.

    Best effort: with a read-only home, or when another process writes at the same time, the check is done once more.
    """
    try:
        path = accel_home() / name
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = list({**recall(name), **found}.items())[-_KEPT:]
        temporary.write_text(json.dumps(dict(kept)), encoding="utf-8")
        temporary.replace(path)
    except (OSError, ConfigError) as error:
        logger.debug("cannot remember checks in %s: %s", name, error)


def folder_digest(folder: Path) -> str:
    """Identifies the files of a folder by their names and all that they hold; of large ones the checksum is remembered by inode, size
    and times of change.
    """
    digest = hashlib.sha256()
    with _Checksums() as checksums:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                digest.update(f"{path.relative_to(folder)}:{checksums.of(path, path.stat())};".encode())
    return digest.hexdigest()
