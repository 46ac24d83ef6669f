"""Files as one table, read by `datasets`, which keeps its rows in Arrow files on disk: they may be larger than memory."""

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
class Broken:
    """A row that has no answer, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive rows.

    Attributes:
        number: Of the part.
        start: Its first row.
        rows: How many.
    """

    number: int
    start: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Files of one kind whose rows follow each other. A copy in another process reads the files there.

    Attributes:
        files: Their paths, in order.
        sha256: Of each.
        dataset: Their rows, a `datasets.Dataset`.
        rows_a_part: Rows of a part at most.
    """

    files: tuple[Path, ...]
    sha256: tuple[str, ...]
    dataset: Any
    rows_a_part: int

    def __reduce__(self) -> Any:
        return scan, ([*self.files], self.rows_a_part)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.dataset)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self.dataset.column_names)

    @property
    def parts(self) -> list[Part]:
        """All rows, in order."""
        starts = range(0, self.rows, self.rows_a_part)
        return [
            Part(number=number, start=start, rows=min(self.rows_a_part, self.rows - start))
            for number, start in enumerate(starts)
        ]

    def types(self, columns: Sequence[str]) -> dict[str, Any]:
        """Arrow's types of some columns; text for those that hold nothing."""
        import pyarrow as pa

        found = {name: self.dataset.data.schema.field(name).type for name in columns}
        return {name: pa.string() if pa.types.is_null(kind) else kind for name, kind in found.items()}

    def read(self, part: Part, columns: Sequence[str]) -> list[Mapping[str, Any]]:
        """The rows of a part, with some of their columns."""
        chosen = self.dataset.select_columns([*columns]).select(range(part.start, part.start + part.rows))
        rows: list[Mapping[str, Any]] = chosen.to_list()
        return rows


def scan(data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], rows_a_part: int) -> Table:
    """Read files.

    Args:
        data: A file, a folder, a pattern such as `part-*.parquet`, or a list of files; of one kind.
        rows_a_part: Rows of a part at most.

    Raises:
        ConfigError: There is no such file, or it is not of a kind that is read.
        InputError: There are no rows, or they cannot be read.
    """
    if rows_a_part < 1:
        raise ConfigError(f"A part cannot have {rows_a_part} rows.", fix="use at least 1.")
    files = _files(data)
    return Table(
        files=files,
        sha256=tuple(sha256(path) for path in files),
        dataset=read_files(files, as_text=True),
        rows_a_part=rows_a_part,
    )


def _files(data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    found: list[Path] = []
    for one in [data] if isinstance(data, str | os.PathLike) else data:
        path = Path(one).expanduser()
        if path.is_dir():
            found += sorted(
                file
                for file in path.iterdir()
                if file.suffix.lower() in TABLES and not file.name.startswith((".", "_"))
            )
        elif path.is_file():
            found.append(path)
        else:
            found += sorted(Path(match) for match in glob.glob(os.fspath(path)))  # noqa: PTH207  # absolute patterns
    kinds = sorted({file.suffix.lower() for file in found})
    if not found:
        raise ConfigError(f"There is no file {data!s}.", fix="check the path.")
    if len(kinds) > 1 or kinds[0] not in TABLES:
        raise ConfigError(
            f"{', '.join(kind or 'files without a suffix' for kind in kinds)} cannot be read as one table.",
            fix=f"use files of one kind: {', '.join(TABLES)}.",
        )
    return tuple(file.absolute() for file in found)
