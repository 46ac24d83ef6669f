"""One part: its rows read, asked of the engine, and written as a file."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ...artifact.json_text import json_text
from ...decoding.generation_options import GenerationOptions
from ...errors import ConfigError, InputError, NotFiniteError, PluginError, TaskError
from ..engine import Engine
from ..job import UnknownOptionError
from ..operations import Operation, refuse_options
from .ledger import Done, write_whole
from .row_inputs import check_needed, inputs_of
from .table_files import Broken, Part, Table

Format = Literal["parquet", "jsonl"]
OnError = Literal["stop", "record"]
_READERS = 16
"""Prompts of a part that are asked at once: as many as an engine makes answers of together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """What is asked of each row.

    Attributes:
        operation: What is asked.
        options: Of the operation.
        columns: Column of the data by use.
        keep: Columns that are copied.
        format: Of the files.
        on_error: Whether a row that cannot be answered ends the run, or is written with what was wrong.
    """

    operation: Operation
    options: Mapping[str, Any]
    columns: Mapping[str, str]
    keep: tuple[str, ...]
    format: Format
    on_error: OnError

    def check(self) -> None:
        """Find what can be found before a row is read.

        Raises:
            ConfigError: An option that is missing, or a format that is not written.
            InputError: An option that has no column, or does not exist.
        """
        check_needed(self.operation, self.options)
        refuse_options(
            self.options, dict.fromkeys(("return_tensors", "return_documents"), "Tensors and documents have no column.")
        )
        answers = self.operation.columns(self.options)
        if self.format not in ("parquet", "jsonl"):
            raise ConfigError(f"{self.format!r} is not written.", fix="use parquet or jsonl.")
        if self.on_error not in ("stop", "record"):
            raise ConfigError(f"on_error is {self.on_error!r}.", fix="use stop or record.")
        taken = {"row", "error", *answers} & set(self.keep)
        if taken:
            raise ConfigError(
                f"The output has columns of its own called {', '.join(sorted(taken))}.", fix="do not keep them."
            )
        if self.operation.name == "generate":
            _generation(self.options)


def compute(engine: Engine, data: Table, part: Part, request: RowRequest, folder: Path) -> Done:
    """Answer the rows of a part, and put them into their file.

    Raises:
        InputError: A row cannot be answered, and that is to end the run.
    """
    wanted = tuple(dict.fromkeys((*request.columns.values(), *request.keep)))
    rows = data.read(part, wanted)
    found = _answered(engine, [inputs_of(request.operation, row, request.columns) for row in rows], request)
    wrong = next((i for i, one in enumerate(found) if isinstance(one, Broken)), None)
    if wrong is not None and request.on_error == "stop":
        raise InputError(
            f"Row {part.start + wrong}: {found[wrong].reason.rstrip('.')}.",
            fix="correct it, or have such rows written with what is wrong: --on-error record.",
        )
    answers = [None if isinstance(one, Broken) else one for one in found]
    errors = [one.reason if isinstance(one, Broken) else None for one in found]
    kept = {name: [row[name] for row in rows] for name in request.keep}
    content = _written(_table(request, part.start, kept, data.types(request.keep), answers, errors), request.format)
    name = f"rows-{part.start:012d}-{part.start + part.rows - 1:012d}.{request.format}"
    write_whole(folder / name, content)
    return Done(
        number=part.number, file=name, start=part.start, rows=part.rows, broken=sum(one is not None for one in errors),
        sha256=hashlib.sha256(content).hexdigest(),
    )  # fmt: skip


def _table(
    request: RowRequest,
    start: int,
    kept: Mapping[str, Sequence[Any]],
    kept_types: Mapping[str, Any],
    answers: Sequence[Any],
    errors: Sequence[str | None],
) -> Any:
    """The rows of a part: their numbers, the columns that are kept, the answers, and what was wrong.

    Args:
        request: What was asked.
        start: The first row's number.
        kept: Values of columns of the data.
        kept_types: Their types.
        answers: `None` for rows without one.
        errors: `None` for rows with one.
    """
    import pyarrow as pa

    kinds = request.operation.columns(request.options)
    rows = [{} if answer is None else request.operation.values(answer, request.options) for answer in answers]
    for row in rows:
        if row.keys() - kinds.keys():
            raise PluginError(
                f"The operation {request.operation.name!r} declares the columns {sorted(kinds)} and returns {sorted(row)}.",
                fix="return a value for each column of Operation.columns from Operation.values.",
            )
    try:
        copied = {name: pa.array(values, kept_types[name]) for name, values in kept.items()}
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(f"A column that is kept changes its type: {error}", fix="keep another one.") from error
    columns = {
        "row": pa.array(range(start, start + len(rows)), pa.int64()),
        **copied,
        **{name: pa.array([row.get(name) for row in rows], kind) for name, kind in kinds.items()},
        "error": pa.array(errors, pa.string()),
    }
    return pa.table(columns)


def _answered(engine: Engine, inputs: Sequence[Any], request: RowRequest) -> list[Any]:
    """The answer to each row, or `Broken`."""
    if request.operation.name == "generate":
        options, generator = _generation(request.options), engine.generator()
        with ThreadPoolExecutor(_READERS) as pool:
            return list(
                pool.map(
                    lambda one: _tried(lambda: generator(one, options)) if not isinstance(one, Broken) else one, inputs
                )
            )

    def submit(one: Any) -> Any:
        return engine.submit(one, operation=request.operation.name, **request.options)

    jobs = [one if isinstance(one, Broken) else _tried(partial(submit, one)) for one in inputs]
    return [job if isinstance(job, Broken) else _tried(job.future.result) for job in jobs]


def _tried(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except UnknownOptionError:
        # No row's fault.
        raise
    except (InputError, TaskError, NotFiniteError) as error:
        return Broken(error.message)


def _generation(options: Mapping[str, Any]) -> GenerationOptions:
    try:
        return GenerationOptions(**options)
    except TypeError as error:
        raise InputError(f"These are no options of a generation: {error}.", fix="see GenerationOptions.") from error


def _text(value: Any) -> str:
    """What JSON has no type for: times and decimals as text."""
    if isinstance(value, bytes):
        raise InputError(
            "A column that is kept holds bytes, which JSON does not.", fix="write parquet, or keep another one."
        )
    return str(value)


def _written(found: Any, format: Format) -> bytes:
    if format == "jsonl":
        lines = [json_text(row, default=_text) for row in found.to_pylist()]
        return "".join(f"{line}\n" for line in lines).encode()
    from pyarrow import parquet

    stream = io.BytesIO()
    parquet.write_table(found, stream, compression="zstd")
    return stream.getvalue()
