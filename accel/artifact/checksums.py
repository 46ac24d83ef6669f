"""Sizes and checksums of files, to detect changed files."""

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
from .home_folder import accel_home

logger = logging.getLogger(__name__)

STAMP = "mtime:"
"""Prefix of a modification time that is recorded instead of a checksum."""
_VERIFIED = "verified.json"
_KEPT = 2000
_LARGE = 1 << 20
_LONGEST_NAME = 1024
_GRAPH_SUFFIXES = (".onnx", ".data", ".xml", ".bin", ".safetensors", ".pt2")
_REMEDY = "create the artifact again, or copy the file again from the original artifact"
_ON_PURPOSE = f"{_REMEDY}. If you changed the file on purpose, run `accel validate FOLDER --accept-files`."


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of an artifact: its name relative to the folder, its size in bytes and its SHA-256 checksum."""

    name: str
    bytes: int
    sha256: str


def sha256(path: Path) -> str:
    """Return a file's SHA-256 checksum in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_files(folder: Path, names: Sequence[str]) -> tuple[FileRecord, ...]:
    """Return records with the size and checksum of each named file in `folder`."""
    return tuple(FileRecord(name=n, bytes=(folder / n).stat().st_size, sha256=sha256(folder / n)) for n in names)


def stamp_files(folder: Path, names: Sequence[str]) -> tuple[FileRecord, ...]:
    """Return records that identify files by size and modification time, without reading the files.

    The records are for folders of other tools, which have no manifest with checksums.
    """
    stats = [(name, (folder / name).stat()) for name in names]
    return tuple(FileRecord(name=n, bytes=stat.st_size, sha256=f"{STAMP}{stat.st_mtime_ns}") for n, stat in stats)


def verify(folder: Path, records: Sequence[FileRecord]) -> None:
    """Compare files with their records. Checksums of files over 1 MiB are cached by inode, size and modification times.

    Raises:
        IntegrityError: A file is missing, truncated or changed, or lies outside the folder. The message names the first
            such file.
    """
    with _Checksums() as checksums:
        for record in records:
            path = folder / _checked_name(folder, record.name)
            fix = f"{_REMEDY}." if path.suffix in _GRAPH_SUFFIXES else _ON_PURPOSE
            stat = check_file(path, folder, fix=fix)
            if stat.st_size != record.bytes:
                raise IntegrityError(
                    f"{path} is truncated or was changed: it has {stat.st_size} bytes, but the manifest records {record.bytes}.",
                    fix=fix,
                )
            checksum = checksums.of(path, stat)
            if checksum != record.sha256:
                raise IntegrityError(
                    f"{path} was changed: its SHA-256 checksum is {checksum[:12]}…, but the manifest records "
                    f"{record.sha256[:12]}….",
                    fix=fix,
                )


class _Checksums:
    """SHA-256 checksums of files. Checksums of files over 1 MiB are cached across processes, by inode, size and
    modification times.
    """

    def __init__(self) -> None:
        self._known: dict[str, Any] | None = None
        self._found: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._found:
            remember(_VERIFIED, self._found)

    def of(self, path: Path, stat: os.stat_result) -> str:
        """Return the checksum of the file `path`; `stat` is its `stat` result, the key in the cache."""
        if stat.st_size <= _LARGE:
            return sha256(path)
        # The key contains `ctime`, because programs can set `mtime` back but not `ctime`.
        key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
        if self._known is None:
            self._known = recall(_VERIFIED)
        cached = self._known.get(key)
        if isinstance(cached, str):
            return cached
        self._found[key] = sha256(path)
        return self._found[key]


def check_file(path: Path, folder: Path, *, fix: str) -> os.stat_result:
    """Return the `stat` result of a file of an artifact. The file is not opened.

    Raises:
        IntegrityError: The file is missing, is not a regular file, or is a link to a file outside the folder.
    """
    try:
        stat = path.stat()
    # `stat` raises `ValueError` for an invalid file name.
    except (OSError, ValueError) as error:
        raise IntegrityError(f"The file {path} of the artifact is missing.", fix=fix) from error
    if not S_ISREG(stat.st_mode):
        # Refuse pipes and devices, because reading a pipe may never end.
        raise IntegrityError(f"{path} is not a regular file.", fix=fix)
    if not is_inside(path, folder):
        raise IntegrityError(
            f"{path} is a link to {path.resolve()}, which is outside the folder of the artifact.", fix=fix
        )
    return stat


def _checked_name(folder: Path, name: str) -> str:
    """Return the file name from a manifest if it is valid.

    Raises:
        IntegrityError: The name is invalid, or leads outside the folder.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or len(name) > _LONGEST_NAME:
        raise IntegrityError(
            f"The manifest of {folder} records the file name {name[:_LONGEST_NAME]!r}, which is invalid or outside the folder.",
            fix=f"{_REMEDY}.",
        )
    return name


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a file lies in its folder. In a Hub snapshot, links into the `blobs` folder of the repository are
    allowed.
    """
    real, root = path.resolve(), folder.resolve()
    if real.is_relative_to(root):
        return True
    snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
    return snapshots is not None and real.is_relative_to(snapshots.parent / "blobs")


def recall(name: str) -> dict[str, Any]:
    """Return the results that `remember` saved in a file of `ACCEL_HOME`; empty if the file is damaged or missing."""
    try:
        values = json.loads((accel_home() / name).read_text(encoding="utf-8"))
        return values if isinstance(values, dict) else {}
    except (OSError, ValueError, ConfigError):
        return {}


def remember(name: str, results: Mapping[str, object]) -> None:
    """Save results of checks in a file of `ACCEL_HOME`, so that the checks are not repeated.

    Best effort: if `ACCEL_HOME` is read-only, or another process writes at the same time, the checks run again next
    time.
    """
    try:
        path = accel_home() / name
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        newest = list({**recall(name), **results}.items())[-_KEPT:]
        temporary.write_text(json.dumps(dict(newest)), encoding="utf-8")
        temporary.replace(path)
    except (OSError, ConfigError) as error:
        logger.debug("cannot save the results of checks in %s: %s", name, error)


def file_digest(path: Path) -> str:
    """Return a file's SHA-256 checksum. Checksums of files over 1 MiB are cached, as in `folder_digest`."""
    with _Checksums() as checksums:
        return checksums.of(path, path.stat())


def folder_digest(folder: Path) -> str:
    """Return a digest of the names and contents of a folder's files. Checksums of files over 1 MiB are cached by inode,
    size and modification times.
    """
    digest = hashlib.sha256()
    with _Checksums() as checksums:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                digest.update(f"{path.relative_to(folder)}:{checksums.of(path, path.stat())};".encode())
    return digest.hexdigest()
