"""Tables that are read part by part, so that they may be larger than memory: CSV, TSV, JSON lines and Parquet."""

from __future__ import annotations

import csv
import functools
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ...errors import ConfigError, InputError

_LONGEST_CELL = 1 << 28
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_LOOKED_AT = 100
"""Rows of a file of JSON lines whose keys are taken for its columns."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that cannot be read, and why."""

    reason: str


Row = Mapping[str, Any] | Broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive rows of one file.

    Attributes:
        number: Of the part.
        file: Position of its file.
        start: Its first row, counted over all files.
        rows: How many.
        offset: Where its first row is in the file: bytes, or rows of a Parquet file.
    """

    number: int
    file: int
    start: int
    rows: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Files of one kind whose rows follow each other.

    Attributes:
        files: Their paths, in order.
        sha256: Of each.
        columns: Names that the first file has.
        parts: All rows, in order.
    """

    files: tuple[Path, ...]
    sha256: tuple[str, ...]
    columns: tuple[str, ...]
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return sum(part.rows for part in self.parts)

    def types(self, columns: Sequence[str]) -> dict[str, Any]:
        """Arrow's types of some columns: as Parquet says, text of CSV, and what the first rows of JSON lines hold."""
        import pyarrow as pa

        first = self.files[0]
        if first.suffix.lower() == ".parquet":
            schema = _Parquet().schema(first)
            return {name: schema.field(name).type for name in columns}
        if first.suffix.lower() in (".csv", ".tsv"):
            return dict.fromkeys(columns, pa.string())
        rows = [row for row in self.read(self.parts[0], columns)[:_LOOKED_AT] if not isinstance(row, Broken)]
        found = {name: pa.infer_type([row.get(name) for row in rows]) for name in columns}
        return {name: pa.string() if pa.types.is_null(kind) else kind for name, kind in found.items()}

    def read(self, part: Part, columns: Sequence[str]) -> list[Row]:
        """The rows of a part, with some of their columns; those that cannot be read say why.

        Raises:
            InputError: The file is not what it was when it was scanned.
        """
        path = self.files[part.file]
        rows = _KINDS[path.suffix.lower()].read(path, part, columns)
        if len(rows) != part.rows:
            raise InputError(
                f"{path} has {len(rows)} rows where there were {part.rows}.", fix="leave it alone meanwhile."
            )
        return rows


def scan(data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], rows_a_part: int) -> Table:
    """Look through files once: their rows, and their digests.

    Args:
        data: A file, a folder, a pattern such as `part-*.parquet`, or a list of files; of one kind.
        rows_a_part: Rows of a part at most; no part spans two files.

    Raises:
        ConfigError: There is no such file, or it is not of a kind that is read.
        InputError: There are no rows.
    """
    if rows_a_part < 1:
        raise ConfigError(f"A part cannot have {rows_a_part} rows.", fix="use at least 1.")
    files = _files(data)
    kind = _KINDS[files[0].suffix.lower()]
    digests: list[str] = []
    parts: list[Part] = []
    start = 0
    for number, path in enumerate(files):
        digest, rows, offsets = kind.scan(path, rows_a_part)
        digests.append(digest)
        for i, offset in enumerate(offsets):
            size = min(rows_a_part, rows - i * rows_a_part)
            parts.append(Part(number=len(parts), file=number, start=start, rows=size, offset=offset))
            start += size
    if not parts:
        raise InputError(f"{files[0]} holds no rows.", fix="pass data with at least one row.")
    return Table(files=files, sha256=tuple(digests), columns=kind.columns(files[0]), parts=tuple(parts))


def _files(data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    found: list[Path] = []
    for one in [data] if isinstance(data, str | os.PathLike) else data:
        path = Path(one).expanduser()
        if path.is_dir():
            found += sorted(
                file
                for file in path.iterdir()
                if file.suffix.lower() in _KINDS and not file.name.startswith((".", "_"))
            )
        elif path.is_file():
            found.append(path)
        else:
            found += sorted(Path(match) for match in glob.glob(os.fspath(path)))  # noqa: PTH207  # absolute patterns, too
    kinds = sorted({file.suffix.lower() for file in found})
    if not found:
        raise ConfigError(f"There is no file {data!s}.", fix="check the path.")
    if len(kinds) > 1 or kinds[0] not in _KINDS:
        raise ConfigError(
            f"{', '.join(kind or 'files without a suffix' for kind in kinds)} cannot be read as one table.",
            fix=f"use files of one kind: {', '.join(_KINDS)}.",
        )
    return tuple(file.absolute() for file in found)


# Kinds of files


class _Kind(Protocol):
    def scan(self, path: Path, rows_a_part: int) -> tuple[str, int, list[int]]:
        """The digest, how many rows, and where each part begins."""

    def columns(self, path: Path) -> tuple[str, ...]:
        """Names of its columns."""

    def read(self, path: Path, part: Part, columns: Sequence[str]) -> list[Row]:
        """The rows of a part."""


class _Lines:
    """The lines of a file of bytes, from some place on: where the next one begins, and a digest of those that were read."""

    def __init__(self, file: BinaryIO, offset: int = 0) -> None:
        file.seek(offset)
        self._file = file
        self.offset = offset
        self.digest = hashlib.sha256()

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.offset += len(line)
            self.digest.update(line)
            # What is no UTF-8 is found in the value that it is in.
            yield line.decode("utf-8", "surrogateescape")


class _OfLines:
    """What CSV and JSON lines have in common."""

    def _records(self, lines: _Lines) -> Iterator[Any]:
        raise NotImplementedError

    def _start(self, path: Path, lines: _Lines) -> Any:
        """What the rows are read with."""

    def _row(self, record: Any, head: Any, columns: Sequence[str]) -> Row:
        raise NotImplementedError

    def scan(self, path: Path, rows_a_part: int) -> tuple[str, int, list[int]]:
        """See `_Kind`."""
        with path.open("rb") as file:
            if file.read(2) in _UTF_16:
                raise InputError(
                    f"{path.name} is UTF-16.", fix=f"convert it: iconv -f utf-16 -t utf-8 {path.name} > OTHER"
                )
            lines = _Lines(file)
            self._start(path, lines)
            rows, offsets, before = 0, [], lines.offset
            for record in self._records(lines):
                if record is not None:
                    if rows % rows_a_part == 0:
                        offsets.append(before)
                    rows += 1
                before = lines.offset
            return lines.digest.hexdigest(), rows, offsets

    def read(self, path: Path, part: Part, columns: Sequence[str]) -> list[Row]:
        """See `_Kind`."""
        with path.open("rb") as file:
            head = self._start(path, _Lines(file))
            made: list[Row] = []
            for record in self._records(_Lines(file, part.offset)):
                if record is not None:
                    made.append(self._row(record, head, columns))
                    if len(made) == part.rows:
                        break
            return made


class _Csv(_OfLines):
    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter

    def _records(self, lines: _Lines) -> Iterator[list[str] | None]:
        csv.field_size_limit(_LONGEST_CELL)
        try:
            # Strict: a quote that is not closed would take all rows behind it into one cell.
            for cells in csv.reader(iter(lines), delimiter=self._delimiter, strict=True):
                yield cells or None
        except csv.Error as error:
            if "new-line character" in str(error):
                raise InputError(
                    f"Lines end in a carriage return alone around byte {lines.offset}.",
                    fix="convert the file: tr '\\r' '\\n' < IN > OUT",
                ) from error
            raise InputError(
                f"The file is no CSV around byte {lines.offset}: {error}.",
                fix='correct it: a quote inside a quoted cell is written twice (""), and one that opens a cell is closed.',
            ) from error

    def _start(self, path: Path, lines: _Lines) -> list[str]:
        head = next((cells for cells in self._records(lines) if cells), None)
        if head is None:
            raise InputError(f"{path.name} is empty.", fix="pass a file with a head and at least one row.")
        head[0] = head[0].removeprefix("\ufeff")
        twice = sorted({name for name in head if head.count(name) > 1})
        if twice:
            raise InputError(f"{path.name} has the column {twice[0]!r} twice.", fix="rename one of them.")
        return head

    def columns(self, path: Path) -> tuple[str, ...]:
        """See `_Kind`."""
        with path.open("rb") as file:
            return tuple(self._start(path, _Lines(file)))

    def _row(self, record: list[str], head: list[str], columns: Sequence[str]) -> Row:
        if len(record) != len(head):
            return Broken(f"it has {len(record)} cells, the head has {len(head)}")
        cells = dict(zip(head, record, strict=True))
        # An empty cell is a missing one.
        return _decoded({name: cells.get(name) or None for name in columns})


class _JsonLines(_OfLines):
    def _records(self, lines: _Lines) -> Iterator[str | None]:
        for line in lines:
            yield line if line.strip() else None

    def _start(self, path: Path, lines: _Lines) -> None:
        with path.open("rb") as file:
            if file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                raise InputError(
                    f"{path.name} is one JSON array.", fix="write an object a line: jq -c '.[]' in > out.jsonl"
                )

    def columns(self, path: Path) -> tuple[str, ...]:
        """See `_Kind`."""
        found: dict[str, None] = {}
        with path.open("rb") as file:
            for _, line in zip(range(_LOOKED_AT), _Lines(file), strict=False):
                row = self._row(line, None, None)
                found |= dict.fromkeys(row if isinstance(row, Mapping) else ())
        return tuple(found)

    def _row(self, record: str, head: None, columns: Sequence[str] | None) -> Row:
        try:
            found = json.loads(record.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            return Broken(f"it is no JSON: {error}")
        if not isinstance(found, dict):
            return Broken(f"it is {type(found).__name__}, not an object")
        return found if columns is None else _decoded({name: found.get(name) for name in columns})


def _decoded(row: dict[str, Any]) -> Row:
    for name, value in row.items():
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                return Broken(f"{name!r} is no UTF-8")
    return row


class _Parquet:
    def scan(self, path: Path, rows_a_part: int) -> tuple[str, int, list[int]]:
        """See `_Kind`."""
        rows = self._opened(path).metadata.num_rows
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return digest, rows, list(range(0, rows, rows_a_part))

    def columns(self, path: Path) -> tuple[str, ...]:
        """See `_Kind`."""
        return tuple(self.schema(path).names)

    def schema(self, path: Path) -> Any:
        """Arrow's schema."""
        return self._opened(path).schema_arrow

    def read(self, path: Path, part: Part, columns: Sequence[str]) -> list[Row]:
        """See `_Kind`."""
        metadata = self._opened(path).metadata
        made: list[Row] = []
        begin, stop = 0, part.offset + part.rows
        for group in range(metadata.num_row_groups):
            end = begin + metadata.row_group(group).num_rows
            if begin < stop and end > part.offset:
                low, high = max(part.offset, begin), min(stop, end)
                found = _row_group(path, path.stat().st_mtime_ns, group, tuple(columns))
                made += found.slice(low - begin, high - low).to_pylist()
            begin = end
        return made

    def _opened(self, path: Path) -> Any:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            return parquet.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{path.name} is no Parquet file: {error}", fix="check the file.") from error


@functools.lru_cache(maxsize=2)
def _row_group(path: Path, changed_ns: int, group: int, columns: tuple[str, ...]) -> Any:  # noqa: ARG001  # a file that changed is another
    """Columns of a row group: one holds many parts, which are read one after another."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        known = [name for name in columns if name in file.schema_arrow.names]
        return file.read_row_group(group, columns=known)


_KINDS: Mapping[str, _Kind] = {
    ".csv": _Csv(","),
    ".tsv": _Csv("\t"),
    ".json": _JsonLines(),
    ".jsonl": _JsonLines(),
    ".ndjson": _JsonLines(),
    ".parquet": _Parquet(),
}
