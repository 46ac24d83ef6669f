"""Read files as one table with `datasets`, which keeps the rows in Arrow files on disk. The table can be larger than memory."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...artifact.checksums import sha256
from ...data.rows import TABLES, read_files
from ...errors import ConfigError


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A failed row of a table, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a table: consecutive rows that are written to one output file.

    Attributes:
        number: Number of the part.
        start: Number of the first row.
        rows: Number of rows.
    """

    number: int
    start: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The rows of several files of the same format, in order. If a `Table` is pickled, the other process reads the files again.

    Attributes:
        files: Paths of the files.
        sha256: Checksums of the files.
        dataset: The rows, as a `datasets.Dataset`.
        rows_a_part: Greatest number of rows in a part.
    """

    files: tuple[Path, ...]
    sha256: tuple[str, ...]
    dataset: Any
    rows_a_part: int

    def __reduce__(self) -> Any:
        return scan, ([*self.files], self.rows_a_part)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.dataset)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self.dataset.column_names)

    @property
    def parts(self) -> list[Part]:
        """The parts of the table, in order; together they contain all rows."""
        starts = range(0, self.rows, self.rows_a_part)
        return [
            Part(number=number, start=start, rows=min(self.rows_a_part, self.rows - start))
            for number, start in enumerate(starts)
        ]

    def types(self, columns: Sequence[str]) -> dict[str, Any]:
        """Return the Arrow types of the given columns by name. A column without any value gets the type string."""
        import pyarrow as pa

        types = {name: self.dataset.data.schema.field(name).type for name in columns}
        return {name: pa.string() if pa.types.is_null(kind) else kind for name, kind in types.items()}

    def read(self, part: Part, columns: Sequence[str]) -> list[Mapping[str, Any]]:
        """Return the rows of a part, with only the given columns."""
        chosen = self.dataset.select_columns([*columns]).select(range(part.start, part.start + part.rows))
        rows: list[Mapping[str, Any]] = chosen.to_list()
        return rows


def scan(data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], rows_a_part: int) -> Table:
    """Read files as one table.

    Args:
        data: A file, a folder, a glob pattern such as `part-*.parquet`, or a list of files; all of the same format.
        rows_a_part: Greatest number of rows in a part.

    Raises:
        ConfigError: There is no such file, or its format is unknown.
        InputError: There are no rows, or they cannot be read.
    """
    if rows_a_part < 1:
        raise ConfigError(
            f"rows_a_part is {rows_a_part}, but each output file needs at least one row.",
            fix="use a number of at least 1 (--rows-a-part).",
        )
    files = _files(data)
    return Table(
        files=files,
        sha256=tuple(sha256(path) for path in files),
        dataset=read_files(files, as_text=True),
        rows_a_part=rows_a_part,
    )


def _files(data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    files: list[Path] = []
    for entry in [data] if isinstance(data, str | os.PathLike) else data:
        path = Path(entry).expanduser()
        if path.is_dir():
            files += sorted(
                file
                for file in path.iterdir()
                if file.suffix.lower() in TABLES and not file.name.startswith((".", "_"))
            )
        elif path.is_file():
            files.append(path)
        else:
            files += sorted(Path(match) for match in glob.glob(os.fspath(path)))  # noqa: PTH207  # `Path.glob` rejects absolute patterns
    kinds = sorted({file.suffix.lower() for file in files})
    if not files:
        raise ConfigError(f"There is no data file {data!s}.", fix="check the path, or add files to the folder.")
    if len(kinds) > 1 or kinds[0] not in TABLES:
        raise ConfigError(
            f"The data files have the suffixes {', '.join(kind or '(no suffix)' for kind in kinds)}, which cannot be read as one "
            "table.",
            fix=f"use files with the same suffix, one of {', '.join(TABLES)}.",
        )
    return tuple(file.absolute() for file in files)
