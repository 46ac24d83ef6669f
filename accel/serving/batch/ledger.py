"""The record of a run and its complete parts, in files that remain valid if the process is killed at any moment.

`_batch.json` describes the run: data, model and request. `_done.jsonl` has one line for each complete part; the line is added after the
part's file is complete. A part without a line is computed again. The file names begin with `_`, because programs that read a folder of
tables skip such files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...artifact.atomic_folder_writing import locked_file
from ...errors import ConfigError, IntegrityError, OutputFolderError

_SCHEMA = 1
_RUN, _DONE, _LOCK = "_batch.json", "_done.jsonl", "_lock"
_PREFIX = ".part-"
"""Prefix of the names of incomplete files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedPart:
    """A part of the table (consecutive rows) whose output file is complete.

    Attributes:
        number: Number of the part.
        file: Name of the part's file.
        start: Number of the part's first row.
        rows: Number of rows in the part.
        broken: Number of failed rows in the part.
        sha256: Checksum of the file.
    """

    number: int
    file: str
    start: int
    rows: int
    broken: int
    sha256: str


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: after a kill or a power failure, the file is either complete or missing."""
    temporary = path.with_name(f"{_PREFIX}{path.name}-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _settle(path.parent)
    except OSError as error:
        raise _unwritten(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _unwritten(path: Path, error: OSError) -> OutputFolderError:
    return OutputFolderError(
        f"The output file {path} cannot be written: {error.strerror}.",
        fix="free disk space or correct the permissions of the folder, and repeat the run: complete parts are kept.",
    )


def _settle(folder: Path) -> None:
    """Flush the folder's entries to the disk, so that new file names survive a power failure."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RunLedger:
    """The record of the run in one output folder.

    Args:
        folder: The output folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: dict[int, CompletedPart] = {}

    @contextmanager
    def opened(self, run: Mapping[str, Any]) -> Iterator[None]:
        """Lock the output folder and begin or continue a run.

        Args:
            run: Description of the run as JSON values; it must be the same when a run is continued.

        Raises:
            OutputFolderError: The folder contains other files, or another process writes to it.
            ConfigError: The folder contains another run.
            IntegrityError: A part's file was changed after it was written.
        """
        run = json.loads(json.dumps({"schema": _SCHEMA, **run}))
        run_file = self.folder / _RUN
        if self.folder.exists() and not self.folder.is_dir():
            raise OutputFolderError(f"The output folder {self.folder} is a file.", fix="choose a new folder.")
        if (
            self.folder.exists()
            and not run_file.is_file()
            and any(not path.name.startswith((_PREFIX, _LOCK)) for path in self.folder.iterdir())
        ):
            raise OutputFolderError(
                f"The output folder {self.folder} contains files that were not written by `accel batch`.",
                fix="choose a new or empty folder.",
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputFolderError(
                f"The output folder {self.folder} cannot be created: {error.strerror}.",
                fix="choose a folder that you have permission to write to.",
            ) from error
        with locked_file(self.folder / _LOCK) as free:
            if not free:
                raise OutputFolderError(
                    f"Another process is writing to the output folder {self.folder}.",
                    fix="wait until the other process ends, or stop it.",
                )
            self._read()
            # If an earlier run wrote no results, the new run may replace it.
            if run_file.is_file() and (self.done or any(self.folder.glob("rows-*"))):
                _compare(_parsed(run_file.read_bytes(), run_file), run, self.folder)
            else:
                write_whole(run_file, json.dumps(run, indent=1).encode() + b"\n")
            for left in self.folder.glob(f"{_PREFIX}*"):
                left.unlink(missing_ok=True)
            yield

    def _read(self) -> None:
        path = self.folder / _DONE
        if not path.is_file():
            return
        content = path.read_bytes()
        complete_lines = content.rpartition(b"\n")[0] + b"\n" if b"\n" in content else b""
        if complete_lines != content:
            # The process was killed while it wrote the last line: remove the incomplete line.
            write_whole(path, complete_lines)
        for line in complete_lines.splitlines():
            try:
                part = CompletedPart(**_parsed(line, path))
            except TypeError as error:
                raise _changed(path) from error
            self.done[part.number] = part
        for number, part in list(self.done.items()):
            file = self.folder / part.file
            if not file.is_file():
                del self.done[number]
                continue
            with file.open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != part.sha256:
                    raise IntegrityError(
                        f"The output file {file} was changed after `accel batch` wrote it.",
                        fix="delete the file and repeat the run: the rows of this file are computed again.",
                    )

    def add(self, part: CompletedPart) -> None:
        """Record a part whose output file is complete.

        Raises:
            OutputFolderError: The record cannot be written.
        """
        path = self.folder / _DONE
        try:
            with path.open("ab") as file:
                file.write(json.dumps(asdict(part)).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _unwritten(path, error) from error
        self.done[part.number] = part


def _parsed(content: bytes, path: Path) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise _changed(path) from error


def _changed(path: Path) -> IntegrityError:
    return IntegrityError(
        f"The file {path} is damaged: its content differs from the content that `accel batch` wrote.",
        fix="restore the file from a backup, or choose another output folder.",
    )


def _compare(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raise if the folder contains a different run.

    Raises:
        ConfigError: The runs differ; the error lists every difference.
    """
    wrong = [
        f"{name} was {_short(before.get(name))} and is {_short(now.get(name))} now"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if wrong:
        raise ConfigError(
            f"The output folder {folder} contains the results of a different run: {'; '.join(wrong)}.",
            fix="repeat the run with the earlier values, or choose another output folder.",
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
